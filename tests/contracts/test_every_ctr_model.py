"""What holds for every model in the registry, and for models of a user's own with dropout and batch normalization."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import RowWiseAdagrad
from heterps_core.models import CTR_MODELS, sized_model
from heterps_core.models.chain import build_chain, load_builder, run_layers
from heterps_core.models.graph_block import tensor_name
from heterps_core.models.model_graph import LayerKind
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.models.tracing import trace_chain
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from tests.bare_stage import CONFIG, bare_stage
from tests.contracts.own_models import OWN_MODELS
from tests.heterps_core.training.reference import plain_model

FEATURES = FeatureSpec(num_dense=5, slot_rows=(50,) * 8)
MODELS = (*CTR_MODELS, *OWN_MODELS)


def make_batch(num_rows: int = 64) -> ClickBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (num_rows, FEATURES.num_slots), generator=generator)
    return ClickBatch(
        dense=torch.randn(num_rows, FEATURES.num_dense, generator=generator),
        ids=ids,
        labels=(ids[:, 0] % 2).float(),
    )


def build_with_tables(model: str, seed: int = 1) -> torch.nn.Sequential:
    chain = build_chain(model, FEATURES, seed=seed)
    for name, layer in chain.named_children():
        if isinstance(layer, SlotEmbedding):
            layer.attach_table(layer.new_table(name, RowWiseAdagrad(), seed=seed))
    return chain


def initial_values(model: str, *, seed: int) -> dict[str, torch.Tensor]:
    chain = build_with_tables(model, seed)
    tables = {
        f"{name}.table": layer.table.weight_RD
        for name, layer in chain.named_children()
        if isinstance(layer, SlotEmbedding) and layer.table is not None
    }
    return {**chain.state_dict(), **tables}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_becomes_a_graph_with_its_own_sizes(model):
    chain = build_chain(model, FEATURES, seed=1)

    graph = trace_chain(model, chain, dense_optimizer_values_per_parameter=2, row_optimizer=RowWiseAdagrad)

    dense_bytes = 4 * sum(parameter.numel() for parameter in chain.parameters())
    kinds = {layer.name: layer.kind for layer in graph.layers}
    assert [layer.name for layer in graph.layers] == [name for name, _ in chain.named_children()]
    assert graph.layers[0].kind is LayerKind.EMBEDDING
    assert graph.layers[-1].output_bytes_per_sample == 4
    assert dense_bytes == sum(
        layer.parameter_bytes for layer in graph.layers if kinds[layer.name] is not LayerKind.EMBEDDING
    )


@pytest.mark.parametrize("model", MODELS)
def test_a_cut_anywhere_gives_the_same_output(model):
    chain, batch = build_with_tables(model).eval(), make_batch()
    whole = run_layers(chain, batch, None)

    for cut in range(1, len(chain)):
        crossing = run_layers(list(chain)[:cut], batch, None)
        assert crossing.ndim == 2
        assert torch.equal(run_layers(list(chain)[cut:], batch, crossing), whole)


@pytest.mark.parametrize("model", MODELS)
def test_the_loss_falls_on_a_learnable_signal(model):
    chain, batch = build_with_tables(model), make_batch()
    optimizer = torch.optim.Adam(chain.parameters(), lr=1e-3)
    losses = []
    torch.manual_seed(0)
    for _ in range(30):
        loss = F.binary_cross_entropy_with_logits(run_layers(chain, batch, None).squeeze(1), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for layer in chain:
            if isinstance(layer, SlotEmbedding) and layer.table is not None:
                layer.table.apply_gradients(learning_rate=0.05)
        losses.append(loss.item())

    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("model", MODELS)
def test_a_seed_fixes_the_initial_values(model):
    first, again, other = (initial_values(model, seed=seed) for seed in (1, 1, 2))

    assert all(torch.equal(first[name], again[name]) for name in first)
    # All of a linear model begins at 0.
    assert (model == "lr") == all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("model", MODELS)
def test_building_teaches_a_model_nothing(model):
    fresh = load_builder(model)(FEATURES).state_dict()
    built = build_chain(model, FEATURES, seed=1)

    assert built.training
    for name, buffer in built.named_buffers():
        if name in fresh:
            assert torch.equal(buffer, fresh[name])


@pytest.mark.parametrize("model", MODELS)
def test_a_row_is_predicted_alike_every_time_alone_and_among_others(model):
    batch = make_batch()
    chain = build_with_tables(model)
    runner = StageRunner(bare_stage(list(chain)), CONFIG)
    list(runner.train_step([MicroBatch(batch.num_rows, batch)]))

    first, again = (runner.predict([MicroBatch(batch.num_rows, batch)]) for _ in range(2))
    alone = [runner.predict([MicroBatch(1, batch.rows(row, row + 1))]) for row in range(4)]

    assert torch.equal(first, again)
    torch.testing.assert_close(torch.cat(alone), first[:4])


WITH_DROPOUT = [
    model for model in CTR_MODELS if "dropout" in inspect.signature(load_builder(model)).parameters
]


@pytest.mark.parametrize("model", WITH_DROPOUT)
def test_dropout_changes_no_weights_name_or_size(model):
    without, with_it = (
        {
            tensor_name(name, layer, key): value.shape
            for name, layer in build_chain(each, FEATURES, seed=1).named_children()
            for key, value in layer.named_parameters()
        }
        for each in (model, sized_model(model, dropout=0.3))
    )

    assert with_it == without


RICH = FeatureSpec(
    num_dense=0,
    slot_rows=(20, 30, 40),
    slot_lengths=(1, 3, 4),
    slot_poolings=("sum", "mean", "sequence"),
    num_labels=2,
)
RICH_BATCH = ClickBatch(
    dense=torch.empty(3, 0),
    ids=torch.tensor([[1, 2, -1, -1, 3, 4, 5, -1], [0, 1, 2, 3, 9, -1, -1, -1], [7, 8, 9, -1, 1, 2, 3, 4]]),
    labels=torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]),
)


@pytest.mark.parametrize("model", [model for model in CTR_MODELS if model != "nce"])
def test_a_model_takes_lists_sequences_and_two_labels_without_dense_features(model):
    chain = build_chain(model, RICH, seed=1)
    for name, layer in chain.named_children():
        if isinstance(layer, SlotEmbedding):
            layer.attach_table(layer.new_table(name, RowWiseAdagrad(), seed=1))

    logits = run_layers(chain, RICH_BATCH, None)

    assert logits.shape == (3, 2)
    for cut in range(1, len(chain)):
        crossing = run_layers(list(chain)[:cut], RICH_BATCH, None)
        assert torch.equal(run_layers(list(chain)[cut:], RICH_BATCH, crossing), logits)
    torch.testing.assert_close(logits, plain_model(model, RICH, seed=1)(RICH_BATCH), rtol=1e-5, atol=1e-6)
