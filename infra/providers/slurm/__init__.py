"""Machines of a Slurm cluster."""
