"""Measures the step of a plan by running it on the engine."""
