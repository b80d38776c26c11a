"""The planner held to what it said: figures of a cluster corrected by what runs took."""
