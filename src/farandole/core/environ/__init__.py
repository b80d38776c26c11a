"""The environment of this process: the one file that reads it, and settings from it."""
