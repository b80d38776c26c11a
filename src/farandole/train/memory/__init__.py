"""The memory of a training: what a model will need, from fake tensors, and the largest micro-batch, by trial."""
