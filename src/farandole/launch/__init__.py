"""Starting processes: what each is told, watching them, stopping them, naming the first failure.

Imports no torch: a launcher starts in milliseconds.
"""
