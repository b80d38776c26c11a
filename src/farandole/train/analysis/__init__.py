"""The profile of a model for the planner: its parts from fake tensors, and their seconds by measurement."""
