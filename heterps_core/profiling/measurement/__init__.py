"""Measures this machine: its layers, steps, links, boundaries and replicas, in processes of their own."""
