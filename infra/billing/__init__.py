"""What runs cost: bills, spending of a living run, caps, waste."""
