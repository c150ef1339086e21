"""Embedding tables: rows, shards, kernels, optimizers."""
