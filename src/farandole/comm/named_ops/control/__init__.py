"""The controller of named operations: its thread, shutdown, stalls, joins."""
