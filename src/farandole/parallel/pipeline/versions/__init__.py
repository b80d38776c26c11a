"""What passes of two batches at once need: the weights of each batch, and a loss that is on its way."""
