"""``codec = "auto"``: measure the link, the codecs and the backward pass; predict; choose; probe again.

core's step model predicts, `probe` and `profile` measure, `profile` corrects, `autotuner` is called by the reducer
after each exchange, and chooses.
"""
