"""Collectives of the backend: broadcast, and segmented ones of our own."""
