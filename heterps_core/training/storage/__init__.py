"""The run directory, local or in a bucket, and the formats in it."""
