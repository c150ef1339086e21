"""Parts of a report that have rules of their own."""
