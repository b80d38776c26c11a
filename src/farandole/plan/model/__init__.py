"""A model as figures: what its units compute, keep and send, without the model itself."""
