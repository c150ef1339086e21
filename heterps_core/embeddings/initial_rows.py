"""The values that rows of a table begin with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from heterps_core.compute_device import CPU
from heterps_core.embeddings.row_range import RowRange

ROWS_PER_BLOCK = 65_536


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
    for rows_of in blocks_of(rows):
        block = rows_of.first // ROWS_PER_BLOCK
        digest = hashlib.sha256(f"{seed}/{table}/{block}".encode()).digest()
        # Drawn on the host, so that a table is the same on any device.
        generator = torch.Generator(CPU).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        drawn = values[rows_of.first - rows.first : rows_of.stop - rows.first]
        if rows_of.num_rows == ROWS_PER_BLOCK and drawn.device == CPU:
            torch.randn(ROWS_PER_BLOCK, dimension, generator=generator, out=drawn, device=CPU)
        else:
            whole = torch.randn(ROWS_PER_BLOCK, dimension, generator=generator, device=CPU)
            drawn.copy_(whole[rows_of.first % ROWS_PER_BLOCK :][: rows_of.num_rows])
        drawn.mul_(standard_deviation)
    return values


def blocks_of(rows: RowRange) -> Iterator[RowRange]:
    """Yield the parts of a range that lie in one block each; half a block takes as long to draw as a whole one."""
    first = rows.first
    while first < rows.stop:
        stop = min(first - first % ROWS_PER_BLOCK + ROWS_PER_BLOCK, rows.stop)
        yield RowRange(first, stop)
        first = stop
