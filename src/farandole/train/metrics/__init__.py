"""Values of all ranks brought together, for metrics."""
