"""A plan on more ranks than there are: scaling, stragglers, noise, failures, and what loading data limits."""
