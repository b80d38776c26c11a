"""A run in the formats of other tools, and the timeline of operations, which is written while it goes on."""
