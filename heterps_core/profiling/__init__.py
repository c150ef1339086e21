"""Measures layers, workers and links on the machine at hand."""
