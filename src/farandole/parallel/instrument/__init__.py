"""Hooks that only look: phases of a step, accelerator events, the buckets of DDP."""
