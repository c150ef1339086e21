"""Requests: rows that were shown together, which share what is known of the user."""
