"""One named operation: request, signature, cache entry, handle."""
