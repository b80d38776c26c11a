"""By which way a bucket travels: flat, hierarchical, shared memory or messages."""
