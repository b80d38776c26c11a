"""The cost model: what a step of a plan takes, holds and sends, from a model's profile and a cluster.

`predict` is exact about what Farandole sends, simulates what overlaps, and says which figures of the cluster the
answer stands on. docs/plan/internals.md has the main formulas.
"""
