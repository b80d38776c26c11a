"""What finders look at and what they return: the table of steps, evidence and findings."""
