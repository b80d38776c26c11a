"""The batch size that a link asks for, and what the gradient noise scale says about going there."""
