"""What a node runs first, the same on every provider."""
