"""From a file of clicks to a prepared data set."""
