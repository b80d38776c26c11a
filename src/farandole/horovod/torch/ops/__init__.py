"""Horovod's tensor operations for PyTorch."""
