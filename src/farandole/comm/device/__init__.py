"""Streams, events, pinned memory and asynchronous copies; the CPU needs none of them."""
