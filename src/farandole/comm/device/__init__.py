"""Streams, events, pinned memory and asynchronous copies of accelerators, and kernels that run there."""
