"""Bytes between hosts: connections, messages, and the thread that drives them."""
