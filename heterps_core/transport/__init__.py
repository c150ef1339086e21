"""How workers of one machine and of several exchange bytes."""
