"""Codecs: how a gradient is made small before it travels, and the mean of all ranks' made of it.

A codec is a generator (see `codec.Codec`): it yields messages, receives what the exchange made of
them, and returns the mean over the ranks and its own contribution. It knows no socket, no engine and no
file, so that the engine, the test driver (`comm.messages`) and the byte counter run the same code.
"""
