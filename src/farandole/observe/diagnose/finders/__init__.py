"""One file for each cause that a diagnosis can name, and the disjoint costs of all of them."""
