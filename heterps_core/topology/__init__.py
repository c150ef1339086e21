"""Where ranks of a plan lie in a network."""
