"""Which plans there are for a model and a cluster, and which of them is best: predicted, not run."""
