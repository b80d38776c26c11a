"""Sharded optimizer states, gradients and parameters: the plan key `zero`."""
