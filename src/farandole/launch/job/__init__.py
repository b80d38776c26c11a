"""What is to run and where: the rank specification, hosts, placement, the run directory."""
