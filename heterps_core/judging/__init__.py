"""How good predictions are, and whether one model is better than another."""
