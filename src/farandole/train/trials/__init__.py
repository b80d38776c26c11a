"""The planner's best plans, each run for some steps in processes of its own."""
