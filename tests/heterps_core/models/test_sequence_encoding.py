"""Models over packed sequences give and learn what they do with the same sequences padded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import NO_ID, FeatureSpec
from heterps_core.embeddings.row_optimizers import RowWiseSGD
from heterps_core.errors import ConfigurationError
from heterps_core.models.architectures.histories import hstu
from heterps_core.models.architectures.histories.din import DIN
from heterps_core.models.architectures.histories.hstu import HSTU
from heterps_core.models.architectures.histories.sasrec import SASRec
from heterps_core.models.chain import build_chain, load_builder, run_layers
from heterps_core.models.sequence_encoding import encode_by_length
from heterps_core.models.slot_embedding import SlotEmbedding

LENGTHS = (70, 33)
FEATURES = FeatureSpec(
    num_dense=2,
    slot_rows=(50, 60, 70),
    slot_lengths=(1, *LENGTHS),
    slot_poolings=("sum", "sequence", "sequence"),
)


def draw_batch(num_rows: int) -> ClickBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (num_rows, FEATURES.num_ids), generator=generator)
    for slot, length in enumerate(LENGTHS, start=1):
        columns = FEATURES.id_columns[slot]
        counts = ((length + 1.0) ** torch.rand(num_rows, 1, generator=generator)).long()
        ids[:, columns.start : columns.stop][torch.arange(length) >= counts] = NO_ID
    return ClickBatch(
        dense=torch.randn(num_rows, 2, generator=generator),
        ids=ids,
        labels=torch.randint(0, 2, (num_rows,), generator=generator).float(),
    )


def learned(model: str, batch: ClickBatch, *, packs: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return logits, and the gradients of all parameters and rows."""
    chain = build_chain(model, FEATURES, seed=1)
    embedding = chain[0]
    embedding.packs_sequences = packs
    embedding.attach_table(embedding.new_table("embedding", RowWiseSGD(), seed=1))
    before = embedding.table.weight_RD.clone()
    logits = run_layers(chain, batch, None)
    F.binary_cross_entropy_with_logits(logits.squeeze(1), batch.labels, reduction="sum").backward()
    embedding.table.apply_gradients(learning_rate=1.0)
    gradients = [parameter.grad for parameter in chain.parameters()]
    return logits, [before - embedding.table.weight_RD, *gradients]


@pytest.mark.parametrize("model", ["din", "sasrec", "hstu", "ctrdnn"])
@pytest.mark.parametrize("num_rows", [1, 40])
def test_a_model_gives_and_learns_the_same_from_packed_and_padded_sequences(model, num_rows):
    batch = draw_batch(num_rows)

    logits, gradients = learned(model, batch, packs=True)
    padded_logits, padded_gradients = learned(model, batch, packs=False)

    torch.testing.assert_close(logits, padded_logits, rtol=0, atol=1e-6)
    for found, expected in zip(gradients, padded_gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("model", ["din", "sasrec", "hstu"])
def test_a_replica_without_rows_learns_nothing(model):
    logits, gradients = learned(model, draw_batch(0), packs=True)

    assert logits.shape == (0, 1)
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("model", [SASRec, HSTU])
def test_a_block_makes_of_each_candidate_what_it_makes_of_it_alone(model):
    torch.manual_seed(0)
    block = model.block(model, 8, most=12)
    values, candidates = torch.randn(3, 11, 8), torch.randn(3, 4, 8)
    is_there = torch.arange(11) < torch.tensor([[1], [7], [11]])

    def made(candidates, *, is_last):
        size = candidates.shape[1]
        sees = torch.cat(
            [is_there[:, None].expand(-1, size, -1), torch.eye(size).bool().expand(3, -1, -1)], 2
        )
        return block(torch.cat([values, candidates], 1), sees[:, None], is_last=is_last)

    together = made(candidates, is_last=True)

    torch.testing.assert_close(made(candidates, is_last=False)[:, 11:], together)
    for place in range(4):
        alone = made(candidates[:, place : place + 1], is_last=False)
        torch.testing.assert_close(alone[:, 11], together[:, place])
        # Values do not see candidates.
        torch.testing.assert_close(alone[:, :11], made(candidates, is_last=False)[:, :11])


@pytest.mark.parametrize("model", ["din", "sasrec", "hstu", "ctrdnn"])
def test_rows_that_share_a_sequence_give_and_learn_what_rows_with_their_own_copies_do(model):
    batch, sizes = draw_batch(40), [1, 5, 16, 1, 2, 9, 6]
    requests = torch.repeat_interleave(torch.arange(7), torch.tensor(sizes))
    is_first = requests.diff(prepend=torch.tensor([-1])).bool()
    ids = batch.ids.clone()
    # The first sequence is the request's, the second one each row's own.
    shared = slice(1, 1 + LENGTHS[0])
    ids[:, shared] = ids[is_first.nonzero()[:, 0]][requests][:, shared]
    once = ids.clone()
    once[:, shared][~is_first] = NO_ID

    logits, gradients = learned(model, replace(batch, ids=once), packs=True)
    expected_logits, expected_gradients = learned(model, replace(batch, ids=ids), packs=True)

    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-6)
    for found, expected in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


def test_pointwise_attention_in_blocks_has_the_values_and_gradients_of_its_formula(monkeypatch):
    monkeypatch.setattr(hstu, "_BLOCK_WEIGHTS", 1)
    query, key, value = (torch.randn(2, 2, 150, 4, requires_grad=True) for _ in range(3))
    sees = torch.ones(150, 150).tril()
    weights = torch.randn(2, 2, 150, 4)

    found = hstu._PointwiseAttention.apply(query, key, value)
    expected = (F.silu(query @ key.transpose(2, 3)) * sees) @ value

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    of_found, of_expected = (
        torch.autograd.grad((each * weights).sum(), (query, key, value)) for each in (found, expected)
    )
    for gradient, of_formula in zip(of_found, of_expected, strict=True):
        torch.testing.assert_close(gradient, of_formula, rtol=1e-4, atol=1e-4)


def test_vectors_of_one_event_are_added():
    aligned = replace(FEATURES, slot_lengths=(1, 70, 70), slot_histories=(0, 1, 1))
    layer = SlotEmbedding(aligned, dimension=3, keeps_sequences=True, packs_sequences=True)
    layer.attach_table(layer.new_table("embedding", RowWiseSGD(), seed=1))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (5, 141), generator=generator)
    counts = torch.tensor([1, 70, 20, 3, 44])
    for first in (1, 71):
        ids[:, first : first + 70][torch.arange(70) >= counts[:, None]] = NO_ID
    activation = layer(ClickBatch(dense=torch.zeros(5, 2), ids=ids, labels=torch.zeros(5)))
    (history,) = layer.sequence_columns.histories

    def last_and_sum(_, values, lengths):
        rows = torch.arange(len(values))
        return torch.cat([values[rows, lengths.squeeze(1) - 1], values.sum(1)], 1).unsqueeze(1)

    found = encode_by_length(activation, activation[:, :0], layer.sequence_columns, history, last_and_sum)

    weight = layer.table.weight_RD
    for row, count in enumerate(counts.tolist()):
        events = weight[50 + ids[row, 1 : 1 + count]] + weight[110 + ids[row, 71 : 71 + count]]
        torch.testing.assert_close(found[row], torch.cat([events[-1], events.sum(0)]))


@pytest.mark.parametrize("model", ["din", "sasrec", "hstu"])
def test_a_model_has_one_encoder_for_the_columns_of_one_history(model):
    aligned = replace(FEATURES, slot_lengths=(1, 70, 70), slot_histories=(0, 1, 1))

    for features, number in ((FEATURES, 2), (aligned, 1)):
        module = load_builder(model)(features)
        encoders = module.history if model == "din" else module.encoders
        assert len(encoders) == number


class Branches(torch.nn.Module):
    """A model with a forward that depends on the lengths of sequences."""

    def __init__(self, features: FeatureSpec) -> None:
        super().__init__()
        self.embedding = SlotEmbedding(features, dimension=3, keeps_sequences=True, packs_sequences=True)
        self.output = torch.nn.Linear(self.embedding.sequence_columns.before + 2, 1)

    def forward(self, batch: ClickBatch) -> torch.Tensor:
        columns = self.embedding(batch)
        if self.embedding.sequence_columns.counts(columns).max() > 5:
            columns = columns * 2
        return self.output(self.embedding.sequence_columns.without_values(columns))


def test_a_forward_that_branches_on_lengths_is_refused_in_one_line():
    with pytest.raises(
        ConfigurationError, match="must do the same for all values, so that it can be"
    ) as caught:
        build_chain(f"{__name__}:Branches", FEATURES, seed=1)

    assert "move that part into a torch.nn.Module of its own" in str(caught.value)
    assert "\n" not in str(caught.value)


class Wide(DIN):
    """A history beside another embedding."""

    def __init__(self, features: FeatureSpec) -> None:
        super().__init__(features)
        self.wide = SlotEmbedding(features, dimension=1)

    def forward(self, batch: ClickBatch) -> torch.Tensor:
        return super().forward(batch) + self.wide(batch).sum(1, keepdim=True)


def test_a_model_with_another_embedding_has_its_sequences_padded_between_layers():
    batch = draw_batch(20)
    torch.manual_seed(1)
    whole, chain = Wide(FEATURES), build_chain(f"{__name__}:Wide", FEATURES, seed=1)
    for part in (*whole.modules(), *chain.modules()):
        if isinstance(part, SlotEmbedding):
            part.attach_table(part.new_table(f"width {part.dimension}", RowWiseSGD(), seed=1))

    torch.testing.assert_close(run_layers(chain, batch, None), whole(batch))
