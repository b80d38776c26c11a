"""The records of a run: written while it trains, kept short on disk, read again on one clock for all ranks."""
