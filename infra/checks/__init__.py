"""What `heterps doctor` looks at."""
