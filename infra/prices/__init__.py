"""What is sold for how much: catalogues, refresh, service charges."""
