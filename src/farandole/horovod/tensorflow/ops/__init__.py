"""Horovod's tensor operations for TensorFlow."""
