"""Collectives of the backend: the sum of a bucket, broadcast."""
