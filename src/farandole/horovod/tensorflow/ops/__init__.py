"""Horovod's tensor operations for TensorFlow, one file for each collective."""
