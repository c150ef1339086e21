"""Tables of Delta and Iceberg: their logs name the files that count."""
