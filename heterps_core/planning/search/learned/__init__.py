"""Networks of the methods that learn."""
