"""A run while it goes on: what each rank does now, from the ends of its files."""
