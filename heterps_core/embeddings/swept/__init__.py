"""Tables on disk, swept in order: rows in blocks, the part of them in memory, and their changes."""
