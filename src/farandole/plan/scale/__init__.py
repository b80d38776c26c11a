"""A plan on more ranks than there are: the cost model over sizes, and what failures cost."""
