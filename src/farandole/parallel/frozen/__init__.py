"""Frozen weights in few bits, and small adapters that train beside them."""
