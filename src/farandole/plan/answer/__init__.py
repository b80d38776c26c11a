"""What the planner says: text for a terminal, JSON, the plan file, and a page."""
