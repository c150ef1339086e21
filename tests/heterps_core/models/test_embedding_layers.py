"""Vectors of a width of their own for each slot, beside one plain table of torch for each slot."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import RowWiseSGD
from heterps_core.errors import ConfigurationError
from heterps_core.models.chain import build_chain, run_layers
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.models.tracing import trace_chain

FEATURES = FeatureSpec(
    num_dense=1,
    slot_rows=(6, 5, 8, 7),
    slot_lengths=(1, 3, 1, 2),
    slot_poolings=("sum", "mean", "sum", "sum"),
    slot_dimensions=(3, None, 1, 3),
)
MODEL = "ctrdnn(hidden_widths=5, embedding_dim=4)"
BATCH = ClickBatch(
    dense=torch.tensor([[0.5], [0.25], [-1.0]]),
    ids=torch.tensor([[4, 1, 2, -1, 7, 6, 0], [5, 3, -1, -1, 7, 6, -1], [4, 2, 4, 1, 0, 1, 2]]),
    labels=torch.tensor([1.0, 0.0, 1.0]),
)
WIDTHS = [3, 4, 1, 3]
ORDER = [0, 3, 1, 2]
"""Of slots in the output: those of one width stand together."""


def test_a_table_for_each_width_learns_what_plain_tables_for_each_slot_learn():
    chain = build_chain(MODEL, FEATURES, seed=1)
    tables = {
        name: layer.new_table(name, RowWiseSGD(), seed=1)
        for name, layer in chain.named_children()
        if isinstance(layer, SlotEmbedding)
    }
    for name, table in tables.items():
        chain.get_submodule(name).attach_table(table)
    assert [tuple(table.weight_RD.shape) for table in tables.values()] == [(13, 3), (5, 4), (8, 1)]
    of_width_3, of_width_4, of_width_1 = (table.weight_RD for table in tables.values())
    starts = [of_width_3[:6], of_width_4, of_width_1, of_width_3[6:]]
    plain = [torch.nn.Parameter(weight.clone()) for weight in starts]
    dense = [parameter.detach().clone().requires_grad_() for parameter in chain.parameters()]

    for _ in range(3):
        logits = run_layers(chain, BATCH, None).squeeze(1)
        F.binary_cross_entropy_with_logits(logits, BATCH.labels).backward()
        for table in tables.values():
            table.apply_gradients(learning_rate=0.5)
        expected = plain_logits(plain, dense)
        gradients = torch.autograd.grad(F.binary_cross_entropy_with_logits(expected, BATCH.labels), plain)
        with torch.no_grad():
            for weight, gradient in zip(plain, gradients, strict=True):
                weight -= 0.5 * gradient
        torch.testing.assert_close(logits, expected)

    found = [of_width_3[:6], of_width_4, of_width_1, of_width_3[6:]]
    for weight, expected, start in zip(found, plain, starts, strict=True):
        torch.testing.assert_close(weight, expected.detach())
        assert weight.data_ptr() == start.data_ptr()


def plain_logits(tables, dense):
    pooled = []
    for slot in ORDER:
        columns = FEATURES.id_columns[slot]
        vectors = []
        for row in BATCH.ids[:, columns.start : columns.stop]:
            values = tables[slot][row[row >= 0]]
            vectors.append(values.mean(0) if FEATURES.slot_poolings[slot] == "mean" else values.sum(0))
        pooled.append(torch.stack(vectors))
    hidden = F.linear(torch.cat([*pooled, BATCH.dense], 1), *dense[:2]).relu()
    return F.linear(hidden, *dense[2:]).squeeze(1)


@pytest.mark.parametrize(
    ("model", "num_tables", "values"),
    [
        # 3 wide: 6 + 7 rows, 4 wide: 5 rows, 1 wide: 8 rows.
        ("ctrdnn", 3, 13 * 3 + 5 * 4 + 8),
        # Behind these the second table: 100 rows of 4 values for each of the four slots.
        ("2emb", 4, 13 * 3 + 5 * 4 + 8 + 4 * 100 * 4),
        # The user has the first two slots, the item the others.
        ("matchnet", 4, 6 * 3 + 5 * 4 + 8 + 7 * 3),
    ],
)
def test_plans_are_charged_for_the_table_of_each_width(model, num_tables, values):
    name = f"{model}(embedding_dim=4)"
    chain = build_chain(name, FEATURES, seed=1)

    graph = trace_chain(name, chain, dense_optimizer_values_per_parameter=0, row_optimizer=RowWiseSGD)

    tables = [layer for layer in graph.layers if layer.is_sharded]
    assert len(tables) == num_tables
    assert sum(layer.parameter_bytes for layer in tables) == 4 * values


def test_a_model_whose_vectors_must_be_of_one_width_refuses_another():
    with pytest.raises(ConfigurationError, match=r"'nce' must look column slot_0 up in vectors of 3 values"):
        build_chain("nce", FEATURES, seed=1)


def test_sequences_of_several_widths_have_an_attention_each():
    features = FeatureSpec(
        num_dense=2,
        slot_rows=(5, 5, 5),
        slot_lengths=(2, 3, 1),
        slot_poolings=("sequence", "sequence", "sum"),
        slot_dimensions=(None, 2, None),
    )

    chain = build_chain(MODEL, features, seed=1)

    assert [name for name, _ in chain.named_children()][:5] == [
        "embedding",
        "attention",
        "embedding_2",
        "attention_2",
        "fc1",
    ]
    # A vector of 4 for each of two slots, one of 2 and two numbers.
    assert chain.fc1.in_features == 4 + 4 + 2 + 2
