"""Prices: dated snapshots and their reader."""
