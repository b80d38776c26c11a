"""Exchanges of encoded tensors without autograd hooks: units, what codecs keep for them, and how that is saved."""
