"""A run while it lives: its record, fleet, losses, budget and cleaning up."""
