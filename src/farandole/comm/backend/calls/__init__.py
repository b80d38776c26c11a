"""A call on its way: who carries it out, how it is waited for, and what torch.compile sees of it."""
