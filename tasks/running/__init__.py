"""A run while it lives: its folder, name, fleet, losses, budget, and what is cleaned up."""
