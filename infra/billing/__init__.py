"""What was spent and what may be: bills, caps, budget, waste, reconciliation."""
