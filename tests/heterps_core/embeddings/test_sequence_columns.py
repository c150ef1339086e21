"""Packed sequences beside the same rows padded: what is looked up and learned, and rows that are cut and joined."""

from __future__ import annotations

import pytest
import torch

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import NO_ID, FeatureSpec
from heterps_core.embeddings.row_optimizers import RowWiseSGD
from heterps_core.embeddings.sequence_columns import SequenceColumns, rounded_lengths
from heterps_core.models.slot_embedding import SlotEmbedding

LENGTHS, DIMENSION = (6, 9), 2
FEATURES = FeatureSpec(
    num_dense=1,
    slot_rows=(20, 30, 40, 50),
    slot_lengths=(6, 1, 3, 9),
    slot_poolings=("sequence", "sum", "mean", "sequence"),
)
COUNTS = torch.tensor([[1, 2], [6, 9], [3, 1], [1, 1], [2, 5]])
SUM_OF_LENGTHS = int(COUNTS.sum())


def draw_batch() -> ClickBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 20, (len(COUNTS), FEATURES.num_ids), generator=generator)
    for number, slot in enumerate((0, 3)):
        columns = FEATURES.id_columns[slot]
        is_after = torch.arange(len(columns)) >= COUNTS[:, number, None]
        ids[:, columns.start : columns.stop][is_after] = NO_ID
    return ClickBatch(
        dense=torch.randn(len(ids), 1, generator=generator), ids=ids, labels=torch.zeros(len(ids))
    )


def make_layer(*, packs: bool) -> SlotEmbedding:
    layer = SlotEmbedding(FEATURES, dimension=DIMENSION, keeps_sequences=True, packs_sequences=packs)
    layer.attach_table(layer.new_table("embedding", RowWiseSGD(), seed=1))
    return layer


def padded_values(activation: torch.Tensor) -> torch.Tensor:
    """Return the values of padded sequences that are there, row by row, [N, D]."""
    columns = make_layer(packs=False).sequence_columns
    values = [
        columns.padded(activation[row : row + 1], place)[0, : COUNTS[row, place]]
        for row in range(len(activation))
        for place in range(len(LENGTHS))
    ]
    return torch.cat(values)


def test_a_packed_embedding_returns_the_values_that_are_there_and_all_other_columns():
    batch, layer = draw_batch(), make_layer(packs=True)
    padded, packed = make_layer(packs=False)(batch), layer(batch)

    columns = layer.sequence_columns
    assert padded.shape[1] == columns.padded_width == layer.output_width
    assert packed.shape[1] == 2 * DIMENSION + -(-SUM_OF_LENGTHS * DIMENSION // 5) + len(LENGTHS) + 1
    assert torch.equal(columns.counts(packed), COUNTS)
    assert torch.equal(columns.counts(padded), COUNTS)
    assert torch.equal(columns.without_values(packed), columns.without_values(padded))
    assert torch.equal(columns.values(packed)[:SUM_OF_LENGTHS], padded_values(padded))


def test_rows_learn_the_same_from_packed_and_from_padded_sequences():
    batch, learned = draw_batch(), []
    weights = torch.randn(SUM_OF_LENGTHS, DIMENSION)
    for packs in (True, False):
        layer = make_layer(packs=packs)
        found = layer(batch)
        columns = layer.sequence_columns
        values = columns.values(found)[:SUM_OF_LENGTHS] if packs else padded_values(found)
        ((values * weights).sum() + columns.without_values(found).square().sum()).backward()
        layer.table.apply_gradients(learning_rate=1.0)
        learned.append(layer.table.weight_RD)

    assert not torch.equal(learned[0], make_layer(packs=True).table.weight_RD)
    torch.testing.assert_close(*learned)


@pytest.mark.parametrize("packs", [True, False])
def test_parts_of_rows_have_their_own_values_and_join_to_the_whole(packs):
    columns = make_layer(packs=True).sequence_columns
    whole = make_layer(packs=packs)(draw_batch()).detach()
    cuts = [(0, 1), (1, 2), (2, 5)]

    parts = [columns.part(whole, COUNTS, first, stop) for first, stop in cuts]

    # The second row has full sequences, which are the same in both forms.
    assert [part.shape[1] < columns.padded_width for part in parts] == [True, False, True]
    joined = columns.joined(parts, [COUNTS[first:stop] for first, stop in cuts])
    assert torch.equal(joined, make_layer(packs=True)(draw_batch()))


def test_rows_are_padded_by_a_quarter_at_most_and_by_a_tenth_in_the_mean():
    counts = torch.arange(1, 8_193)
    rounded = rounded_lengths(counts, most=8_192)

    assert (rounded >= counts).all()
    assert (rounded[15:] < 1.25 * counts[15:]).all()
    assert rounded.sum() < 1.1 * counts.sum()
    assert len(rounded.unique()) == 37


def test_no_rows_are_as_wide_as_padded_ones():
    columns = SequenceColumns(before=1, lengths=(4,), dimension=2, after=0, histories=((0,),))
    assert columns.width(torch.empty(0, 1, dtype=torch.int64)) == columns.padded_width == 10
