"""Commands around the planner: measuring what machines give, and what follows from it."""
