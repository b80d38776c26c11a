"""Checks of a distributed training: equal parameters, sharded data, gradients against one process."""
