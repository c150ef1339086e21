"""A node of a run: its life, failures and memory."""
