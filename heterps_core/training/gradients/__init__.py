"""Sums, checks and optimizers of gradients."""
