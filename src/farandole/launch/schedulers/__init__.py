"""Handing a job to Slurm, MPI, Kubernetes or Ray."""
