"""Models that weigh the values of histories: sequences of a row in the order of time."""
