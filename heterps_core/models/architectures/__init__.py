"""Click models of the literature, one per file, as plain modules; `parts` is what several are made of."""
