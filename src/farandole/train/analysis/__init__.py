"""Any model as the planner sees it: parts and memory from fake tensors, seconds by measurement, trials."""
