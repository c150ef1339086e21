"""What was measured or estimated, as files and caches."""
