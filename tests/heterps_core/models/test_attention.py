"""Sequences in order, and attention over them, beside the same worked out value by value."""

from __future__ import annotations

import torch

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import RowWiseSGD
from heterps_core.models.attention import AttentionPooling
from heterps_core.models.slot_embedding import SlotEmbedding

FEATURES = FeatureSpec(
    num_dense=1,
    slot_rows=(10, 20, 30),
    slot_lengths=(1, 3, 4),
    slot_poolings=("sum", "sequence", "sequence"),
)
BATCH = ClickBatch(
    dense=torch.tensor([[0.5], [0.25]]),
    ids=torch.tensor([[4, 7, 8, -1, 3, 2, 1, 5], [1, 0, -1, -1, 9, -1, -1, -1]]),
    labels=torch.zeros(2),
)
SEQUENCES = [[[7, 8], [3, 2, 1, 5]], [[0], [9]]]


def make_layer(**others) -> SlotEmbedding:
    layer = SlotEmbedding(FEATURES, dimension=2, **others)
    layer.attach_table(layer.new_table("embedding", RowWiseSGD(), seed=1))
    return layer


def vector(layer: SlotEmbedding, slot: int, row: int) -> torch.Tensor:
    return layer.table.weight_RD[FEATURES.slot_offsets[slot] + row]


def test_a_sequence_is_kept_in_order_with_zeros_after_its_end_and_its_length():
    layer = make_layer(keeps_sequences=True, input_width=1)

    found = layer(BATCH, torch.full((2, 1), 7.0))

    assert found.shape == (2, layer.output_width)
    for row, (first, second) in enumerate(SEQUENCES):
        expected = [torch.tensor([7.0]), vector(layer, 0, int(BATCH.ids[row, 0]))]
        for slot, sequence, length in ((1, first, 3), (2, second, 4)):
            expected += [vector(layer, slot, value) for value in sequence]
            expected.append(torch.zeros(2 * (length - len(sequence))))
        expected += [torch.tensor([len(first), len(second)]), BATCH.dense[row]]
        assert torch.equal(found[row], torch.cat(expected))


def test_a_layer_that_does_not_keep_sequences_averages_them():
    layer = make_layer()

    found = layer(BATCH)

    assert found.shape == (2, 3 * 2 + 1)
    for row, sequences in enumerate(SEQUENCES):
        for slot, sequence in enumerate(sequences, start=1):
            mean = torch.stack([vector(layer, slot, value) for value in sequence]).mean(0)
            torch.testing.assert_close(found[row, 2 * slot : 2 * slot + 2], mean)


def test_attention_weighs_the_values_that_are_there_by_their_scores():
    layer = make_layer(keeps_sequences=True)
    attention = AttentionPooling(layer)
    attention.queries.data = torch.tensor([[20.0, -10.0], [0.0, 0.0]])

    found = attention(layer(BATCH))

    assert found.shape == (2, attention.output_width)
    for row, sequences in enumerate(SEQUENCES):
        expected = [vector(layer, 0, int(BATCH.ids[row, 0])), BATCH.dense[row]]
        for slot, (sequence, query) in enumerate(zip(sequences, attention.queries, strict=True), start=1):
            vectors = torch.stack([vector(layer, slot, value) for value in sequence])
            shares = (vectors @ query).exp()
            expected.append((shares[:, None] * vectors).sum(0) / shares.sum())
        torch.testing.assert_close(found[row], torch.cat(expected))


def test_values_that_fill_a_sequence_learn_nothing():
    layer = make_layer(keeps_sequences=True)
    before = layer.table.weight_RD.clone()

    layer(BATCH).sum().backward()
    layer.table.apply_gradients(learning_rate=1.0)

    offsets = FEATURES.slot_offsets
    used = {
        offsets[slot] + value for of_row in SEQUENCES for slot, each in enumerate(of_row, 1) for value in each
    }
    used |= {4, 1}
    changed = (layer.table.weight_RD != before).any(1).nonzero().flatten().tolist()
    assert changed == sorted(used)
