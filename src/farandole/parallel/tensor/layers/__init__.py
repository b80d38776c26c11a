"""What each rank does of a divided layer: collectives, layers, and tensors that are gathered when needed."""
