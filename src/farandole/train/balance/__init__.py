"""Batches in proportion to the speed of a rank: the plan's `balance`."""
