"""Proposes a schema for a table that was never seen, and says what to check in it."""
