"""Activations that are computed again in backward instead of kept: plan key ``recompute``."""
