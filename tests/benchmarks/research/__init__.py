"""Evidence and training that are no product."""
