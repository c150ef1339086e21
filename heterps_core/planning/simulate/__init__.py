"""A plan as an event simulation of the trainer."""
