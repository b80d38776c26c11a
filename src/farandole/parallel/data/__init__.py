"""Data parallelism beside the gradients: BatchNorm, buffers, and models compared between ranks."""
