"""The scheduling problem: what is given."""
