"""The gradients of one rank: the owner of `parameter.grad`, and accumulation until a later pass."""
