"""The loop's helpers, each usable alone: the session, shares of the data, progress, verification."""
