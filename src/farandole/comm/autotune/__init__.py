"""``codec = "auto"``: measure the link, the codecs and the backward pass; predict; choose; look again.

`model` predicts and chooses (plain numbers, no torch), `probe` measures, `tuner` sits in the engine.
"""
