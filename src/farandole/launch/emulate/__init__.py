"""Hosts on one machine: namespaces, shaped links between them, and a command that runs on them."""
