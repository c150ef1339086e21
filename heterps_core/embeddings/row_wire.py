"""Rows of a table, or their gradients, in the number format in which replicas send them.

Of int8 each row has a scale of its own, its largest magnitude divided by 127, in float32 before its numbers: rounding
to the nearest step then moves a number by at most 1/254 of the largest of its row. Scales by row keep the frequent
rows, whose gradients are large, from setting the step of all others (as the row-wise quantized embeddings of FBGEMM,
Khudia et al. 2021).

Shapes: U rows, D numbers of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 127
SCALE_BYTES = 4


def wire_bytes(dimension: int, dtype: torch.dtype) -> int:
    """Return what a message has for one row."""
    return dimension * dtype.itemsize + (SCALE_BYTES if dtype is torch.int8 else 0)


def new_message(num_rows: int, dimension: int, dtype: torch.dtype, *, device: torch.device) -> Tensor:
    """Return memory for a message with some rows."""
    width = wire_bytes(dimension, dtype) // dtype.itemsize
    return torch.empty(num_rows, width, dtype=dtype, device=device)


def to_wire(rows_UD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the message with rows in float32."""
    if dtype is not torch.int8:
        return rows_UD.to(dtype)
    scale_U1 = rows_UD.abs().amax(1, keepdim=True) / STEPS
    # A row of zeros has a scale of 0.
    steps_UD = (rows_UD / scale_U1.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(-STEPS, STEPS)
    return torch.cat(
        [scale_U1.reshape(-1).view(torch.int8).view(-1, SCALE_BYTES), steps_UD.to(torch.int8)], 1
    )


def from_wire(message: Tensor) -> Tensor:
    """Return the rows of a message, in float32."""
    if message.dtype is not torch.int8:
        return message.float()
    scale_U1 = message[:, :SCALE_BYTES].reshape(-1).view(torch.float32)[:, None]
    return message[:, SCALE_BYTES:].float().mul_(scale_U1)
