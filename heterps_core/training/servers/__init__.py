"""Parameter servers for hybrid updates."""
