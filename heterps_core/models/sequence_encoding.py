"""Rows with histories of about one length are encoded together, so work and memory follow the sum of the lengths.

Shapes: B rows, b rows of about one length, T values of a sequence, D values of a vector, W columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from heterps_core.embeddings.sequence_columns import SequenceColumns, rounded_lengths

Encode: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Makes [b, D] of columns [b, W], values [b, T, D], of which a row's own come first, and lengths [b, 1]."""


def encode_by_length(
    activation_BW: Tensor,
    context_BW: Tensor,
    columns: SequenceColumns,
    sequences: Sequence[int],
    encode: Encode,
) -> Tensor:
    """Return what `encode` makes of a history [B, D], padded or packed; vectors of one event are added.

    Args:
        context_BW: Columns of each row that `encode` takes too.
        columns: Where the sequences of the activation are.
        sequences: Which of them; of several in a row as long.
    """
    counts_BS = columns.counts(activation_BW)
    if columns.is_padded(activation_BW):
        values_BTD = _sum(columns.padded(activation_BW, each) for each in sequences)
        return encode(context_BW, values_BTD, counts_BS[:, sequences[0], None])
    counts_B = counts_BS[:, sequences[0]]
    starts_BS = counts_BS.flatten().cumsum(0).view_as(counts_BS) - counts_BS
    rounded_B, rows_B = rounded_lengths(counts_B, most=columns.lengths[sequences[0]]).sort(stable=True)
    lengths, sizes = (each.tolist() for each in torch.unique_consecutive(rounded_B, return_counts=True))
    # One more value, of zeros, fills up rows.
    values_MD = F.pad(columns.values(activation_BW), (0, 0, 0, 1))
    places = []
    for length, rows_b in zip(lengths, torch.split(rows_B, sizes), strict=True):
        within_T = torch.arange(length, device=rows_b.device)
        of_rows = starts_BS[rows_b][:, None] + within_T[:, None]
        is_there = (within_T < counts_B[rows_b, None]).unsqueeze(2)
        places.append(of_rows.where(is_there, len(values_MD) - 1).flatten(0, 1))
    places_XS = torch.cat(places)
    values_XD = _sum(values_MD.index_select(0, places_XS[:, each]) for each in sequences)
    parts = torch.split(values_XD, [len(each) for each in places])
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


def _sum(values: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, values)
