"""Batches that a thread draws, ahead of the loop that uses them."""
