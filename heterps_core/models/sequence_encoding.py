"""Histories of about one length are encoded together, so work and memory follow the sum of the lengths.

A history that several rows share, as candidates of a request do, is encoded once, with the columns of all of them.
Shapes: B rows, R histories, r histories of about one length, C rows that share one, T values of a sequence, D values
of a vector, W columns.
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
"""Makes [r, C, D] of columns [r, C, W], values [r, T, D], of which a history's own come first, and lengths [r, 1]."""


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
        return encode(context_BW.unsqueeze(1), values_BTD, counts_BS[:, sequences[0], None]).squeeze(1)
    counts_B = counts_BS[:, sequences[0]]
    starts_BS = counts_BS.flatten().cumsum(0).view_as(counts_BS) - counts_BS
    heads_R = counts_B.nonzero()[:, 0]
    sizes_R = heads_R.diff(append=heads_R.new_tensor([len(counts_B)]))
    rounded_R = rounded_lengths(counts_B[heads_R], most=columns.lengths[sequences[0]])
    # Histories of few rows apart from those of many.
    keys_R, order_R = (_MOST_BITS * rounded_R + (2 * sizes_R - 1).log2().long()).sort(stable=True)
    keys, nums = (each.tolist() for each in torch.unique_consecutive(keys_R, return_counts=True))
    heads_R, sizes_R = heads_R[order_R], sizes_R[order_R]
    # One more value, of zeros, fills up rows.
    values_MD = F.pad(columns.values(activation_BW), (0, 0, 0, 1))
    places, rows, owned, shapes = [], [], [], []
    for key, heads_r, sizes_r in zip(
        keys, torch.split(heads_R, nums), torch.split(sizes_R, nums), strict=True
    ):
        within_T = torch.arange(key // _MOST_BITS, device=heads_r.device)
        of_rows = starts_BS[heads_r][:, None] + within_T[:, None]
        is_there = (within_T < counts_B[heads_r, None]).unsqueeze(2)
        places.append(of_rows.where(is_there, len(values_MD) - 1).flatten(0, 1))
        # Its first row again fills up a history of fewer rows than others have.
        within_C = torch.arange(int(sizes_r.max()), device=heads_r.device)
        is_own = within_C < sizes_r[:, None]
        rows.append((heads_r[:, None] + within_C * is_own).flatten())
        owned.append(is_own.flatten())
        shapes.append((len(heads_r), len(within_C), len(within_T)))
    places_XS, rows_Y = torch.cat(places), torch.cat(rows)
    values_XD = _sum(values_MD.index_select(0, places_XS[:, each]) for each in sequences)
    encoded = [
        encode(context_YW.view(num, most, -1), values_D.view(num, length, -1), counts_B[heads_r, None])
        for context_YW, values_D, heads_r, (num, most, length) in zip(
            torch.split(context_BW.index_select(0, rows_Y), [len(each) for each in rows]),
            torch.split(values_XD, [len(each) for each in places]),
            torch.split(heads_R, nums),
            shapes,
            strict=True,
        )
    ]
    own_B = torch.cat(owned).nonzero()[:, 0]
    return torch.cat([each.flatten(0, 1) for each in encoded]).index_select(0, own_B[rows_Y[own_B].argsort()])


_MOST_BITS = 64
"""Of the number of rows that share a history."""


def _sum(values: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, values)
