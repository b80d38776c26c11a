"""Random programs of plans: a small model on ranks by a layout, beside one process that computes the same.

`program` says what a program is, `draw` makes one of a seed, `model` and `data` are what it trains, `play` is its
loop on a rank and in one process, `judge` compares, `__main__` plays many.
"""
