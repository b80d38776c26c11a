"""How one model is spread over the ranks. Today: data parallel.

`distribute` changes the objects it is given in place and wraps nothing.
"""
