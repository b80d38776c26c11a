"""Gradients of TensorFlow: side by side in flat buckets, exchanged in place, at once or inside a graph."""
