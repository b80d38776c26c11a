"""Rows of tensors between their owners and all ranks: sums to owners, and from owners to all ranks."""
