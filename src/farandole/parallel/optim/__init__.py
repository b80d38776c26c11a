"""What belongs to the optimizer's step under data parallelism."""
