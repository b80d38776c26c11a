"""The processes of one host: starting, watching, stopping, and naming the root cause."""
