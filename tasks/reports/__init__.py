"""The report of a run: figures, text, page."""
