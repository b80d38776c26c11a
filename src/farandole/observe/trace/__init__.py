"""Traces that Chrome and Perfetto show: the named operations and the buckets of a run."""
