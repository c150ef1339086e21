"""The values that rows of a table begin with."""

from __future__ import annotations

import hashlib

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
