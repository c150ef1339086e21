"""Which replica owns which rows of a table.

Shards are contiguous and in the global order of rows, cut as `torch.chunk` and DTensor's `Shard(0)` cut a
tensor, so that a checkpoint does not depend on how many replicas wrote it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from heterps_core.compute_device import CPU

ROWS_PER_BLOCK = 65_536


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


def initial_rows(
    rows: RowRange,
    *,
    table: str,
    dimension: int,
    seed: int,
    standard_deviation: float,
    out: Tensor | None = None,
) -> Tensor:
    """Draw initial rows from a normal distribution.

    Tables of different names get different values; `dimension` is the width D of a row.

    Returns:
        Tensor [rows, D], float32, that depends on nothing but the arguments' values per row.
    """
    values = torch.empty(rows.num_rows, dimension, device=CPU) if out is None else out
    for block in range(rows.first // ROWS_PER_BLOCK, -(-rows.stop // ROWS_PER_BLOCK)):
        block_first = block * ROWS_PER_BLOCK
        digest = hashlib.sha256(f"{seed}/{table}/{block}".encode()).digest()
        # Drawn on the host, so that a table is the same on any device.
        generator = torch.Generator(CPU).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        block_values = torch.randn(ROWS_PER_BLOCK, dimension, generator=generator, device=CPU)
        first, stop = max(rows.first, block_first), min(rows.stop, block_first + ROWS_PER_BLOCK)
        values[first - rows.first : stop - rows.first] = block_values[
            first - block_first : stop - block_first
        ]
    return values.mul_(standard_deviation)
