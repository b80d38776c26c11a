"""Kernels in C for the CPU, compiled where they run; everything works without them.

`build` compiles, keeps and calls the library. Nothing here knows a codec, and no caller may depend on
the loops: `loops()` is None without a compiler, and a rank with them sends and computes the same bits as one
without.
"""
