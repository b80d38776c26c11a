"""What becomes of each layer of a model: by names, classes and traces; and what is refused."""
