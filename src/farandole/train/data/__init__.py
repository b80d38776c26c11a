"""Sharding a data loader over the ranks."""
