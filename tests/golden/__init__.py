"""Losses of three small trainings to full precision, and the bytes they sent: both change only on purpose."""
