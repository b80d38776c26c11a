"""Horovod's tensor operations for PyTorch, one file for each collective."""
