"""The supervisor of one remote host, started over ssh."""
