"""The parameters of a model at servers: who has which, the order of gradients, and what a rank does."""
