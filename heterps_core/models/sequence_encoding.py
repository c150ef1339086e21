"""Rows with histories of about one length are encoded together, so work and memory follow the sum of the lengths.

Shapes: B rows, b rows of about one length, T values of a sequence, D values of a vector, W columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from heterps_core.embeddings.sequence_columns import SequenceColumns, rounded_lengths

Encode: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Makes [b, D] of columns [b, W], values [b, T, D], of which a row's own come first, and lengths [b, 1]."""


def encode_by_length(
    activation_BW: Tensor, context_BW: Tensor, columns: SequenceColumns, place: int, encode: Encode
) -> Tensor:
    """Return what `encode` makes of a sequence [B, D], padded or packed.

    Args:
        context_BW: Columns of each row that `encode` takes too.
        columns: Where the sequences of the activation are.
        place: Which of them.
    """
    counts_BS = columns.counts(activation_BW)
    if columns.is_padded(activation_BW):
        return encode(context_BW, columns.padded(activation_BW, place), counts_BS[:, place, None])
    counts_B = counts_BS[:, place]
    starts_B = (counts_BS.flatten().cumsum(0).view_as(counts_BS) - counts_BS)[:, place]
    rounded_B, rows_B = rounded_lengths(counts_B, most=columns.lengths[place]).sort(stable=True)
    lengths, sizes = (each.tolist() for each in torch.unique_consecutive(rounded_B, return_counts=True))
    # One more value, of zeros, fills up rows.
    values_MD = F.pad(columns.values(activation_BW), (0, 0, 0, 1))
    places = []
    for length, rows_b in zip(lengths, torch.split(rows_B, sizes), strict=True):
        within_T = torch.arange(length, device=rows_b.device)
        of_rows = starts_B[rows_b, None] + within_T
        places.append(of_rows.where(within_T < counts_B[rows_b, None], len(values_MD) - 1).flatten())
    parts = torch.split(values_MD.index_select(0, torch.cat(places)), [len(each) for each in places])
    encoded = [
        encode(context_bW, part.view(size, length, columns.dimension), counts_b1)
        for context_bW, part, counts_b1, size, length in zip(
            torch.split(context_BW.index_select(0, rows_B), sizes),
            parts,
            torch.split(counts_B[rows_B, None], sizes),
            sizes,
            lengths,
            strict=True,
        )
    ]
    return torch.cat(encoded).index_select(0, rows_B.argsort())
