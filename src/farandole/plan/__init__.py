"""The planner: what a run of a model needs, predicted before it is started. Pure arithmetic: imports no torch."""
