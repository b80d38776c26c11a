"""Inside `DistributedOptimizer`: the paths of gradients, names, Adasum, join."""
