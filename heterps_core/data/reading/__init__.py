"""Readers of text and Parquet, file by file and day by day."""
