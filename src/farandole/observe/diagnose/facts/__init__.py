"""What finders look at and what they return: records, the table of steps, evidence and findings."""
