"""Gradients of a backward pass on their way to all ranks: owners, buckets, rows, hooks, what is in flight."""
