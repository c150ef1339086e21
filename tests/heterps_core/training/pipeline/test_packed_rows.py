"""Rows with packed sequences arrive with their own values, and with lengths that are exact in any format."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from heterps_core.embeddings.sequence_columns import SequenceColumns
from heterps_core.training.pipeline.packed_rows import PackedRows

COLUMNS = SequenceColumns(before=2, lengths=(700, 30), dimension=3, after=1, histories=((0,), (1,)))
# 257 and 301 are no bfloat16; a row with full sequences is as wide as a padded one.
COUNTS = torch.tensor([[257, 1], [700, 30], [1, 1], [0, 0], [301, 29]])


def draw_rows() -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return all rows packed, and of each row the columns beside its values and the values."""
    generator = torch.Generator().manual_seed(0)
    sizes = COUNTS.sum(1).tolist()
    of_rows = [
        (torch.randn(3, generator=generator), torch.randn(size, 3, generator=generator)) for size in sizes
    ]
    values = torch.cat([values for _, values in of_rows]).flatten()
    width = -(-len(values) // len(sizes))
    middle = torch.cat([values, torch.zeros(width * len(sizes) - len(values))]).view(len(sizes), width)
    beside = torch.stack([beside for beside, _ in of_rows])
    return torch.cat([beside[:, :2], middle, COUNTS.float(), beside[:, 2:]], 1), of_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [[0, 5], [0, 1, 2, 5], [2, 3, 5], [1, 2]])
def test_rows_arrive_with_their_own_values(dtype, cuts):
    rows_BW, of_rows = draw_rows()
    packed = PackedRows(COLUMNS, dtype)
    ends = list(pairwise(cuts))

    messages = [packed.message(rows_BW, COUNTS, *end) for end in ends]
    sizes = [stop - first for first, stop in ends]
    for message, size in zip(messages, sizes, strict=True):
        assert packed.message_bytes(message[: packed.head_bytes(size)], size) == len(message)
    arrived = packed.rows(messages, sizes)

    assert arrived.dtype is torch.float32
    counts = COUNTS[cuts[0] : cuts[-1]]
    assert torch.equal(COLUMNS.counts(arrived), counts)
    for number, (beside, values) in enumerate(of_rows[cuts[0] : cuts[-1]]):
        [own] = COLUMNS.part(arrived, counts, number, number + 1)
        assert torch.equal(COLUMNS.without_values(own[None])[0], beside.to(dtype).float())
        found = own[2:-3]
        if len(found) == sum(COLUMNS.lengths) * 3:
            long, short = counts[number].tolist()
            found = found.view(-1, 3)
            found = torch.cat([found[:long], found[700 : 700 + short]]).flatten()
        assert torch.equal(found, values.to(dtype).float().flatten())


def test_a_replica_without_rows_gets_none():
    assert PackedRows(COLUMNS, torch.bfloat16).rows([], []).shape == (0, COLUMNS.padded_width)
