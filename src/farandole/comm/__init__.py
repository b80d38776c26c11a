"""Moving tensors between ranks: the world, agreement before bytes move, buckets, the gradient reducer.

Knows nothing of models' meaning, of files or of how processes were started.
"""
