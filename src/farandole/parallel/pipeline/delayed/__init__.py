"""Pipelines without a flush between batches: gradients come one step late (PipeDream-2BW)."""
