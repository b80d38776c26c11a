"""The job and its ranks: the rank specification, hosts, placement, the run directory."""
