"""The gradients of one rank: who owns `parameter.grad`, and what stays here until a later pass."""
