"""Ranks that do no steps: a thread that notices it, and says which rank is where."""
