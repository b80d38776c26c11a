"""Pipeline parallelism: a model cut into stages, and its step by the actions of a schedule."""
