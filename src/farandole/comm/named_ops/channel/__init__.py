"""The control connections between ranks."""
