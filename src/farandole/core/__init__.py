"""The vocabulary every other package speaks; standard library only.

Errors, units, the plan, what a rank is told by its launcher, and the events a run
records. Nothing here starts a process, opens a socket or imports torch.

>>> from farandole.core.vocabulary.spec import Plan
>>> Plan(bucket_bytes=1 << 20).bucket_bytes
1048576
"""
