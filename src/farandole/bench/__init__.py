"""Measuring real things: the demo, its models and its data sets."""
