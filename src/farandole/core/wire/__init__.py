"""Bytes on a connection: where a frame ends, and whether it may be trusted."""
