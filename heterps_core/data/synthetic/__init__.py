"""Synthetic clicks whose truth is known."""
