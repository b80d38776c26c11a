"""Gradients of a backward pass: hooks, passes, and buckets in flight."""
