"""Slots, lists and sequences of one table learn what plain torch learns with one `nn.Embedding` for all of them."""

from __future__ import annotations

import copy
import functools
import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.compute_device import one_torch_thread
from heterps_core.data.batch import ClickBatch
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import NO_ID, DynamicIds, FeatureSpec
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import DataSchema, MultiHotColumn
from heterps_core.embeddings.initial_rows import initial_rows
from heterps_core.embeddings.row_optimizers import RowWiseSGD
from heterps_core.embeddings.row_range import RowRange
from heterps_core.errors import ConfigurationError
from heterps_core.models.chain import build_chain, load_builder
from heterps_core.models.graph_block import tensor_name
from heterps_core.models.tracing import trace_chain
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.serving.exported_model import ClickPredictor
from heterps_core.training.checkpoint import complete_checkpoints
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_layers import StageLayers
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace, connect_neighbours
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.training.storage.run_directory import CHECKPOINTS, RunDirectory
from heterps_core.transport.rank_layout import RankLayout
from tests.heterps_core.training.test_dynamic_ids import CONFIG as DYNAMIC_CONFIG
from tests.heterps_core.training.test_dynamic_ids import Night
from tests.heterps_core.training.test_swept_training import ALONE, REPLICAS, Trained, assert_alike
from tests.heterps_core.training.test_swept_training import CONFIG as SWEPT_CONFIG
from tests.one_step import train_one_step
from tests.worker_processes import run_in_processes

ITEMS, SITES, DIMENSION = 40, 30, 8
FEATURES = FeatureSpec(
    num_dense=2,
    slot_rows=(ITEMS, SITES, ITEMS, ITEMS),
    slot_names=("item", "site", "similar", "history"),
    slot_lengths=(1, 1, 3, 5),
    slot_poolings=("sum", "sum", "mean", "sequence"),
    slot_tables=(0, 1, 0, 0),
)
MODELS = [f"{name}(embedding_dim={DIMENSION}, hidden_widths=16)" for name in ("din", "sasrec", "hstu")]
MODEL, SEED, RATE = MODELS[0], 5, 0.1
each_model = pytest.mark.parametrize("model", MODELS)
NUM_STEPS, STEP_ROWS = 4, 48
CONFIG = TrainingConfig(
    batch_size=STEP_ROWS,
    num_microbatches=3,
    num_epochs=1,
    seed=SEED,
    dense_optimizer="sgd",
    embedding_optimizer="sgd",
)
LARGEST_DIFFERENCE = {MODELS[0]: 1.5e-8, MODELS[1]: 3e-8, MODELS[2]: 3e-8}
"""Of replicas, which add micro-batches: half a unit and one unit in the last place of values between a quarter and a
half."""


@pytest.fixture(autouse=True)
def one_thread():
    """The threads of a worker on a CPU; two add in another order than one."""
    with one_torch_thread():
        yield


class OneTable(nn.Module):
    """What DIN's embedding returns, by an `nn.Embedding` of items for three columns and one of sites."""

    def __init__(self, weight_RD: Tensor) -> None:
        super().__init__()
        items, sites = weight_RD.split([ITEMS, SITES])
        self.items = nn.Embedding.from_pretrained(items, freeze=False)
        self.sites = nn.Embedding.from_pretrained(sites, freeze=False)

    def forward(self, batch: ClickBatch) -> Tensor:
        item, site, similar, history = batch.ids.split([1, 1, 3, 5], 1)
        similar_B3D, history_B5D = (
            self.items(ids.clamp(min=0)) * (ids != NO_ID).unsqueeze(2) for ids in (similar, history)
        )
        num_similar, num_history = ((ids != NO_ID).sum(1, keepdim=True) for ids in (similar, history))
        of_slots = [
            self.items(item).flatten(1),
            self.sites(site).flatten(1),
            similar_B3D.sum(1) / num_similar,
        ]
        return torch.cat([*of_slots, history_B5D.flatten(1), num_history, batch.dense], 1)


def draw_batch(step: int) -> ClickBatch:
    generator = torch.Generator().manual_seed(step)
    # Cubed: a few rows are in every column of nearly every row, so columns meet on the same rows.
    drawn = torch.rand(STEP_ROWS, 10, generator=generator) ** 3
    ids = (drawn * torch.tensor([ITEMS, SITES, *[ITEMS] * 8])).long()
    for first, stop in ((2, 5), (5, 10)):
        lengths = torch.randint(1, stop - first + 1, (STEP_ROWS, 1), generator=generator)
        ids[:, first:stop][torch.arange(stop - first) >= lengths] = NO_ID
    return ClickBatch(
        dense=torch.randn(STEP_ROWS, 2, generator=generator),
        ids=ids,
        labels=torch.randint(0, 2, (STEP_ROWS,), generator=generator).float(),
    )


@functools.cache
def initial_chain(model: str = MODEL) -> nn.Sequential:
    return build_chain(model, FEATURES, seed=SEED)


@functools.cache
def learned_plainly(model: str) -> dict[str, Tensor]:
    """Return what the module learns in plain torch, by the names of tensors in checkpoints, and each step's loss."""
    embedding = initial_chain(model)[0]
    weight = initial_rows(
        RowRange(0, ITEMS + SITES),
        table="embedding",
        dimension=DIMENSION,
        seed=SEED,
        standard_deviation=embedding.initial_standard_deviation,
    )
    torch.manual_seed(SEED)
    module = load_builder(model)(FEATURES)
    module.embedding = OneTable(weight.clone())
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    losses = []
    for step in range(NUM_STEPS):
        batch = draw_batch(step)
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(module(batch).squeeze(1), batch.labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    table = module.embedding
    rows = torch.cat([table.items.weight, table.sites.weight]).detach()
    assert (rows - weight).abs().max() > 1e-3
    dense = {name: value.detach() for name, value in module.named_parameters() if "embedding." not in name}
    return {**dense, "embedding.weight": rows, "losses": torch.tensor(losses)}


def largest_difference(model: str, found: dict[str, tuple[slice, Tensor]]) -> float:
    expected = learned_plainly(model)
    return max((value - expected[name][rows]).abs().max().item() for name, (rows, value) in found.items())


@pytest.mark.slow
@each_model
def test_a_model_cut_anywhere_learns_what_one_embedding_used_for_all_columns_learns(model):
    assert len(initial_chain(model)) > 3
    for place in range(1, len(initial_chain(model))):
        chain = copy.deepcopy(initial_chain(model))
        table = chain[0].new_table("embedding", RowWiseSGD(), seed=SEED)
        assert tuple(table.weight_RD.shape) == (ITEMS + SITES, DIMENSION)
        chain[0].attach_table(table)
        stages = [StageLayers(list(chain)[:place]), StageLayers(list(chain)[place:])]
        optimizer = torch.optim.SGD(chain.parameters(), lr=RATE)
        losses = []
        for step in range(NUM_STEPS):
            batch = draw_batch(step)
            optimizer.zero_grad()
            crossing = stages[0](batch, None)
            entering = crossing.detach().requires_grad_()
            loss = F.binary_cross_entropy_with_logits(stages[1](batch, entering).squeeze(1), batch.labels)
            loss.backward()
            crossing.backward(entering.grad)
            for stage in stages:
                stage.weight_gradients.finish()
            optimizer.step()
            table.apply_gradients(learning_rate=RATE)
            losses.append(loss.item())
        found = {
            tensor_name(name, layer, key): (slice(None), value)
            for name, layer in chain.named_children()
            for key, value in layer.named_parameters()
        }
        found["embedding.weight"] = (slice(None), table.weight_RD)
        found["losses"] = (slice(None), torch.tensor(losses))
        assert found.keys() == learned_plainly(model).keys()
        assert largest_difference(model, found) <= 1.5e-8


def differences_of_every_cut(rank: int, model: str, shares: tuple[tuple[int, ...], ...]) -> list[float]:
    middles = range(2, len(initial_chain(model)))
    return [largest_difference(model, train_part(rank, model, middle, shares)) for middle in middles]


def train_part(
    rank: int, model: str, middle: int, shares: tuple[tuple[int, ...], ...]
) -> dict[str, tuple[slice, Tensor]]:
    """Return what this rank of replicas (2, 1, 2) learned."""
    num_layers, ranks, replicas = (
        len(initial_chain(model)),
        ((0, 1), (2,), (3, 4)),
        (2, 1, 2),
    )
    firsts = [0, 1, middle]
    stages = [
        Stage(first, stop - 1, "cpu", count)
        for first, stop, count in zip(firsts, [*firsts[1:], num_layers], replicas, strict=True)
    ]
    groups = [dist.new_group(list(each)) for each in ranks]
    layout = RankLayout(ranks, shares)
    neighbours = connect_neighbours(layout, rank=rank, shares_memory=bool(shares))
    index, replica = layout.position(rank)
    group = groups[index] if replicas[index] > 1 else None
    place = StagePlace(layout=layout, stage=index, replica=replica, group=group, neighbours=neighbours)
    part = build_stage_model(model, FEATURES, CONFIG, stages, place)
    runner = StageRunner(part, CONFIG, place)
    for step in range(NUM_STEPS):
        batch = draw_batch(step)
        microbatches = [
            MicroBatch(size, batch.rows(rows.first, rows.stop))
            for size, rows in runner.row_slices(batch.num_rows, CONFIG.num_microbatches)
        ]
        train_one_step(part, runner, microbatches, dense_learning_rate=RATE, embedding_learning_rate=RATE)
    found = {
        tensor_name(name, layer, key): (slice(None), value.detach())
        for name, layer in part.layers.items()
        for key, value in layer.named_parameters()
    }
    for name, table in part.tables.items():
        found[f"{name}.weight"] = (slice(table.rows.first, table.rows.stop), table.weight_RD)
    return found


@pytest.mark.slow
@each_model
@pytest.mark.parametrize("shares", [(), ((3, 1), (1,), (1, 15))], ids=["equal", "unequal"])
def test_replicas_of_three_stages_learn_what_one_embedding_used_for_all_columns_learns(model, shares):
    by_rank = run_in_processes(differences_of_every_cut, 5, model, shares)
    assert len(by_rank[0]) > 2
    assert max(itertools.chain(*by_rank)) <= LARGEST_DIFFERENCE[model]


def test_a_plan_counts_the_bytes_of_a_shared_table_once_and_the_look_ups_of_each_slot():
    graph = trace_chain(
        MODEL, initial_chain(), dense_optimizer_values_per_parameter=0, row_optimizer=RowWiseSGD
    )

    assert graph.layers[0].parameter_bytes == 4 * (ITEMS + SITES) * DIMENSION
    assert graph.layers[0].looked_up_bytes_per_sample == 4 * (1 + 1 + 3 + 5) * DIMENSION


def test_a_model_that_looks_columns_of_one_table_up_apart_is_refused():
    with pytest.raises(
        ConfigurationError, match="the columns item, similar, history, which share a table, up in one"
    ):
        build_chain("matchnet", FEATURES, seed=SEED)
    # What no layer looks up together with others is no mistake.
    build_chain("matchnet", replace(FEATURES, slot_tables=(0, 1, 2, 2)), seed=SEED)


SCHEMA = DataSchema(
    name="items",
    label_column="click",
    categorical_columns=("item", "site"),
    multi_hot_columns=(MultiHotColumn(name="clicked", max_length=4),),
    tables={"item": "items", "clicked": "items"},
)
NUM_ROWS, NUM_ITEMS = 4_100, 300
SWEPT_MEMORY_BYTES = 160_000
"""Of a table of 20,000 rows of 20 bytes."""


def write_rows(path: Path) -> dict[str, Any]:
    generator = np.random.default_rng(1)
    items = [f"item {number}" for number in (generator.random(NUM_ROWS) ** 2 * NUM_ITEMS).astype(int)]
    clicked = [
        [f"item {number}" for number in generator.integers(0, NUM_ITEMS, length)]
        for length in generator.integers(0, 5, NUM_ROWS)
    ]
    columns = {
        "click": generator.integers(0, 2, NUM_ROWS).astype(np.int8),
        "item": items,
        "site": [f"item {number}" for number in generator.integers(0, 20, NUM_ROWS)],
        "clicked": clicked,
    }
    pq.write_table(pa.table(columns), path)
    return columns


def prepare(folder: Path, *, rows: int, dynamic_ids: DynamicIds | None = None) -> PreparedDataset:
    write_rows(folder / "rows.parquet")
    schema = replace(SCHEMA, dynamic_ids=dynamic_ids)
    return prepare_dataset(
        folder / "rows.parquet", schema=schema, buckets_per_slot=rows, out_dir=folder / "prepared"
    )


@pytest.mark.parametrize("dynamic_ids", [None, DynamicIds()], ids=["hashed", "dynamic"])
def test_a_text_has_one_id_in_all_columns_of_a_table_and_another_elsewhere(dynamic_ids, tmp_path):
    dataset = prepare(tmp_path, rows=100_000, dynamic_ids=dynamic_ids)
    columns = write_rows(tmp_path / "again.parquet")
    ids = next(dataset.parts(0, dataset.manifest.num_rows)).ids

    of_texts: dict[str, set[int]] = {}
    for row in range(NUM_ROWS):
        of_texts.setdefault(columns["item"][row], set()).add(int(ids[row, 0]))
        for text, id_ in zip(columns["clicked"][row], ids[row, 2:].tolist(), strict=False):
            of_texts.setdefault(text, set()).add(id_)
    assert {len(each) for each in of_texts.values()} == {1}
    assert len(of_texts) == NUM_ITEMS
    assert len(set().union(*of_texts.values())) > 0.99 * NUM_ITEMS
    of_sites = {text: int(id_) for text, id_ in zip(columns["site"], ids[:, 1], strict=True)}
    assert all(id_ not in of_texts[text] for text, id_ in of_sites.items())


@pytest.mark.slow
def test_a_shared_table_on_disk_learns_what_it_learns_in_memory(tmp_path):
    dataset = prepare(tmp_path, rows=10_000)
    config = replace(SWEPT_CONFIG, num_microbatches=1)
    in_memory = Trained(dataset, tmp_path / "memory", ALONE, config)

    swept = Trained(
        dataset, tmp_path / "swept", ALONE, replace(config, embedding_memory_bytes=SWEPT_MEMORY_BYTES)
    )

    assert_alike(swept, in_memory)
    assert in_memory.tensors["embedding.weight"].shape == (20_000, 4)
    assert swept.counts[0].bytes_written > 0


@pytest.mark.slow
def test_a_shared_table_with_dynamic_ids_is_trained_by_replicas_resumed_exported_and_predicts(tmp_path):
    dataset = prepare(tmp_path, rows=512, dynamic_ids=DynamicIds(min_sightings=2, time_to_live_days=2))
    columns = write_rows(tmp_path / "again.parquet")
    night = Night(dataset, tmp_path / "alone", config=DYNAMIC_CONFIG)
    expected = night.tensors
    replicas = Night(dataset, tmp_path / "replicas", stages=REPLICAS, config=DYNAMIC_CONFIG)

    for name in ("id_keys", "id_sightings", "id_last_seen_day"):
        assert torch.equal(replicas.tensors[f"embedding.{name}"], expected[f"embedding.{name}"]), name
    torch.testing.assert_close(
        replicas.tensors["embedding.weight"], expected["embedding.weight"], rtol=1e-3, atol=1e-3
    )
    num_train = dataset.num_train_rows
    seen = {text for texts in columns["clicked"][:num_train] for text in texts} | {
        *columns["item"][:num_train]
    }
    # An item has one id, whichever column shows it; lists may be empty, which is an id too.
    assert [each.num_ids for each in night.turnover] == [len(seen) + 1, len(set(columns["site"][:num_train]))]
    predictor = ClickPredictor(night.exported)
    found = predictor.predict(
        {name: values[num_train:] for name, values in columns.items() if name != "click"}
    )
    logits = torch.tensor([night.logits[row] for row in range(num_train, NUM_ROWS)]).double()
    np.testing.assert_allclose(found, logits.sigmoid().numpy(), atol=1e-6)

    run = RunDirectory(str(tmp_path / "alone"))
    shutil.rmtree(run.path(f"{CHECKPOINTS}/{complete_checkpoints(run)[-1]}"))
    night.finish(dataset)
    assert all(torch.equal(night.tensors[name], tensor) for name, tensor in expected.items())
