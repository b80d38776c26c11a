"""Reading the records of a run: one rank's timeline, one clock for all, how the run ended."""
