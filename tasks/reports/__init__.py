"""What a run shows: terminal, page, figures."""
