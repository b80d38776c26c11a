"""Jobs whose number of ranks changes while they run."""
