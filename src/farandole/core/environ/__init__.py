"""What the environment says: this rank, its node, its launcher, its job's plan."""
