"""For front ends whose tensors are not torch's: arrays, flat buckets of gradients, layouts compared once."""
