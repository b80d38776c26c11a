"""Conversion between checkpoints and the formats of torch and safetensors, by one process."""
