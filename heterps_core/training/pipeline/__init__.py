"""Stages of a pipeline and what they exchange."""
