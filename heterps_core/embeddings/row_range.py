"""Shards: the rows of a table that each replica owns.

Shards are contiguous and in the global order of rows, cut as `torch.chunk` and DTensor's `Shard(0)` cut a
tensor, so that a checkpoint does not depend on how many replicas wrote it. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows first..stop-1 of a table."""

    first: int
    stop: int

    @property
    def num_rows(self) -> int:
        """Number of rows, 0 or more."""
        return self.stop - self.first


def rows_per_shard(num_rows: int, num_shards: int, *, multiple: int = 1) -> int:
    """Return the rows of every shard but the last ones, which may be smaller or empty: a multiple of a number."""
    return -(-num_rows // (num_shards * multiple)) * multiple


def shard_rows(num_rows: int, num_shards: int, shard: int, *, multiple: int = 1) -> RowRange:
    """Return the rows that one shard owns.

    Example:
        >>> [shard_rows(10, 4, i).num_rows for i in range(4)]
        [3, 3, 3, 1]
    """
    size = rows_per_shard(num_rows, num_shards, multiple=multiple)
    first = min(shard * size, num_rows)
    return RowRange(first, min(first + size, num_rows))
