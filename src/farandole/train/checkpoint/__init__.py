"""`fd.save`, `fd.load` and `fd.Checkpointer`: what a training needs to go on, from every rank, and back."""
