"""Workers that look rows up in parameter servers learn what one process learns, as stale as the bound allows."""

from __future__ import annotations

from collections import deque
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from heterps_core.compute_device import CPU
from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.initialization import initial_rows
from heterps_core.embeddings.row_range import RowRange
from heterps_core.models.chain import build_chain
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import TrainingConfig
from heterps_core.training.parameter_server import ParameterServer
from heterps_core.training.parameter_server_client import PulledTable
from heterps_core.training.rank_layout import RankLayout
from heterps_core.training.run_directory import RunDirectory
from heterps_core.training.stage_model import StageModel, build_stage_model
from heterps_core.training.stage_runner import MicroBatch, StageRunner
from tests.heterps_core.training.reference import PlainModel, train_plainly
from tests.worker_processes import run_in_processes

FEATURES = FeatureSpec(num_dense=13, slot_rows=(300,) * 26)
# 41 rows are shared by no number of workers and micro-batches evenly; of one row all but one worker get nothing.
STEP_ROWS = [48] * 6 + [41, 48, 48, 1, 48, 48]
NUM_HELD_OUT_ROWS = 41


class Case(NamedTuple):
    model: str
    num_servers: int
    num_replicas: tuple[int, ...]
    """Of the stages behind the servers."""

    first_layers: tuple[int, ...]
    bound: int
    num_microbatches: int = 2
    on_cuda: bool = False
    """The replicas of the first stage behind the servers compute on CUDA devices."""

    @property
    def world_size(self) -> int:
        return self.num_servers + sum(self.num_replicas)

    @property
    def config(self) -> TrainingConfig:
        return TrainingConfig(
            batch_size=48,
            num_microbatches=self.num_microbatches,
            num_epochs=1,
            seed=5,
            dense_optimizer="sgd",
            dense_learning_rate=0.2,
            embedding_optimizer="sgd",
            embedding_learning_rate=20.0,
            update_mode="hybrid",
            staleness_bound_steps=self.bound,
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        firsts = (0, *self.first_layers)
        lasts = [*(first - 1 for first in self.first_layers), len(initial_chain(self.model)) - 1]
        counts = (self.num_servers, *self.num_replicas)
        return tuple(
            Stage(first, last, "cpu", count) for first, last, count in zip(firsts, lasts, counts, strict=True)
        )


FRESH = [
    Case("ctrdnn", 1, (1,), (1,), bound=0),
    Case("ctrdnn", 2, (3,), (1,), bound=0, num_microbatches=1),
    Case("ctrdnn", 3, (2, 1), (1, 5), bound=0),
    # Its second table belongs to a later stage and stays synchronous.
    Case("2emb", 2, (1, 2), (1, 4), bound=0),
    # Two tables on the servers.
    Case(f"{__name__}:build_two_tables", 2, (2,), (2,), bound=0),
    Case(f"{__name__}:build_two_tables", 2, (1,), (2,), bound=0, on_cuda=True),
]
STALE = [Case("ctrdnn", 2, (2,), (1,), bound=bound) for bound in (1, 3)]
CASES = FRESH + STALE


def build_two_tables(features: FeatureSpec) -> torch.nn.Sequential:
    first = SlotEmbedding(features, dimension=3, slots=range(5))
    second = SlotEmbedding(
        features, dimension=4, rows_per_slot=7, include_dense=False, input_width=first.output_width
    )
    return torch.nn.Sequential(first, second, torch.nn.Linear(second.output_width, 1))


@cache
def initial_chain(model: str) -> torch.nn.Sequential:
    return build_chain(model, FEATURES, seed=5)


def make_batch(step: int, num_rows: int) -> ClickBatch:
    generator = torch.Generator().manual_seed(step)
    return ClickBatch(
        dense=torch.randn(num_rows, FEATURES.num_dense, generator=generator),
        # Cubed: a few rows of each slot are in nearly every batch, so workers meet on the same rows.
        ids=(torch.rand(num_rows, FEATURES.num_slots, generator=generator) ** 3 * 300).long(),
        labels=torch.randint(0, 2, (num_rows,), generator=generator).float(),
    )


def microbatches_of(model: StageModel, runner: StageRunner, step: int, num_rows: int) -> list[MicroBatch]:
    """Cut a batch, and ask for what it looks up where it is one to train on (`step` is not negative)."""
    batch = make_batch(step, num_rows)
    parts, sizes = [], []
    for size, rows in runner.row_slices(num_rows, model_microbatches):
        own = slice(rows.first, rows.stop)
        parts.append(ClickBatch(dense=batch.dense[own], ids=batch.ids[own], labels=batch.labels[own]))
        sizes.append(size)
    exchanges: list[list[object]] = [[] for _ in parts]
    for layer in model.layers.values() if step >= 0 else ():
        if isinstance(layer, SlotEmbedding) and isinstance(layer.table, PulledTable):
            pulled = layer.table.pull([layer.row_numbers(part) for part in parts], step=step)
            for exchange, one in zip(exchanges, pulled, strict=True):
                exchange.append((layer.table, one))
    return [
        MicroBatch(size, part.to(model.device), exchange)
        for size, part, exchange in zip(sizes, parts, exchanges, strict=True)
    ]


model_microbatches = 0


def train_all(rank: int, folder: str) -> None:
    for number, case in enumerate(CASES):
        if case.on_cuda and not torch.cuda.is_available():
            continue
        counts = (case.num_servers, *case.num_replicas)
        firsts = [sum(counts[:stage]) for stage in range(len(counts))]
        ranks = [tuple(range(first, first + count)) for first, count in zip(firsts, counts, strict=True)]
        groups = [dist.new_group(list(members)) for members in ranks]
        layout = RankLayout(tuple(ranks)).with_servers()
        if rank < case.world_size:
            stage, replica = layout.position(rank)
            group = groups[stage] if counts[stage] > 1 else None
            model = build_stage_model(
                case.model,
                FEATURES,
                case.config,
                case.stages,
                stage,
                group,
                layout=layout,
                device=torch.device("cuda", replica) if stage == 1 and case.on_cuda else CPU,
            )
            if stage == 0:
                result = serve(model, layout, replica, f"{folder}/{number}")
            else:
                result = work(model, layout, stage, replica, group, case)
            torch.save(result, f"{folder}/{number}-{rank}.pt")
        dist.barrier()


def serve(model: StageModel, layout: RankLayout, replica: int, folder: str) -> dict[str, object]:
    server = ParameterServer(list(model.tables.values()), layout=layout, replica=replica)
    server.start(0)
    for num_rows in STEP_ROWS:
        server.train_step([MicroBatch(num_rows, make_batch(0, 0))])
    server.predict([MicroBatch(1, make_batch(0, 0))] * len(server.row_slices(NUM_HELD_OUT_ROWS, 2)))
    server.close(RunDirectory(folder))
    return {
        "dense": {},
        "shards": {name: (table.rows, table.weight_RD) for name, table in model.tables.items()},
        "logits": [],
        "losses": None,
        "staleness": server.staleness,
    }


def work(
    model: StageModel,
    layout: RankLayout,
    stage: int,
    replica: int,
    group: dist.ProcessGroup | None,
    case: Case,
) -> dict[str, object]:
    global model_microbatches
    model_microbatches = case.num_microbatches
    runner = StageRunner(
        list(model.layers.values()),
        layout=layout,
        stage=stage - 1,
        replica=replica,
        input_width=model.input_width,
        output_width=model.output_width,
        group=group,
        device=model.device,
    )
    for table in model.pulled_tables:
        table.start(0)
    losses = []
    ahead: deque[list[MicroBatch]] = deque()
    to_ask = iter(enumerate(STEP_ROWS))
    for _ in STEP_ROWS:
        # Two steps further than the one that is trained, whatever the bound.
        while len(ahead) < 3 and (following := next(to_ask, None)) is not None:
            ahead.append(microbatches_of(model, runner, *following))
        losses.append(sum(runner.train_step(ahead.popleft())))
        model.apply_gradients(dense_learning_rate=0.2, embedding_learning_rate=20.0)
    model_microbatches = 2
    logits = runner.predict(microbatches_of(model, runner, -99, NUM_HELD_OUT_ROWS))
    slices = [rows for _, rows in runner.row_slices(NUM_HELD_OUT_ROWS, 2)]
    for table in model.pulled_tables:
        table.close()
    return {
        "dense": {
            f"{name}.{parameter_name}": parameter.detach().cpu()
            for name, layer in model.layers.items()
            for parameter_name, parameter in layer.named_parameters()
        },
        "shards": {name: (table.rows, table.weight_RD) for name, table in model.tables.items()},
        "losses": losses if runner.is_last else None,
        "logits": list(zip(slices, torch.split(logits, [rows.num_rows for rows in slices]), strict=True))
        if runner.is_last
        else [],
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all cases in one group of processes; starting one for each would take most of the time."""
    folder = tmp_path_factory.mktemp("trained")
    run_in_processes(train_all, max(case.world_size for case in CASES), str(folder))
    return folder


@cache
def trained_plainly(model: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], Tensor]:
    """Return parameters before and after, losses, and held-out logits of one process."""
    chain = build_chain(model, FEATURES, seed=5)
    tables = {
        name: initial_rows(
            RowRange(0, layer.num_rows),
            table=name,
            dimension=layer.dimension,
            seed=5,
            standard_deviation=layer.dimension**-0.5 / 10,
        )
        for name, layer in chain.named_children()
        if isinstance(layer, SlotEmbedding)
    }
    plain = PlainModel(chain, tables)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    batches = [make_batch(step, num_rows) for step, num_rows in enumerate(STEP_ROWS)]
    losses = train_plainly(plain, batches, dense_learning_rate=0.2, embedding_learning_rate=20.0)
    with torch.no_grad():
        logits = plain(make_batch(-99, NUM_HELD_OUT_ROWS))
    return before, plain.state_dict(), losses, logits


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number,
            id=str(case),
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ]
            if case.on_cuda
            else [],
        )
        for number, case in enumerate(FRESH)
    ],
)
def test_without_staleness_hybrid_learns_what_one_process_learns(number: int, trained: Path) -> None:
    case = FRESH[number]
    before, after, losses, logits = trained_plainly(case.model)

    largest_difference, largest_update, num_logits, num_rows = 0.0, 0.0, 0, 0
    for rank in range(case.world_size):
        part = torch.load(trained / f"{number}-{rank}.pt", weights_only=False)
        found = {f"chain.{name}": (slice(None), value) for name, value in part["dense"].items()}
        for name, (rows, weight) in part["shards"].items():
            found[f"chain.{name}.weight"] = (slice(rows.first, rows.stop), weight)
            num_rows += rows.num_rows
        for name, (rows, value) in found.items():
            largest_difference = max(largest_difference, (value - after[name][rows]).abs().max().item())
            largest_update = max(largest_update, (after[name] - before[name]).abs().max().item())
        if part["losses"] is not None:
            assert part["losses"] == pytest.approx(losses, abs=1e-5)
        for rows, one in part["logits"]:
            num_logits += len(one)
            torch.testing.assert_close(one, logits[rows.first : rows.stop], atol=1e-4, rtol=1e-4)
        if rank < case.num_servers:
            assert part["staleness"].max_steps == 0
    tables = [layer for layer in initial_chain(case.model) if isinstance(layer, SlotEmbedding)]
    assert num_rows == sum(layer.num_rows for layer in tables)
    assert num_logits == NUM_HELD_OUT_ROWS
    assert largest_update > 0.01
    assert largest_difference < 1e-4 * largest_update


@pytest.mark.parametrize("case", STALE, ids=str)
def test_rows_are_never_staler_than_the_bound(case: Case, trained: Path) -> None:
    number = CASES.index(case)
    _, _, losses, _ = trained_plainly(case.model)
    seen = [
        torch.load(trained / f"{number}-{rank}.pt", weights_only=False)["staleness"]
        for rank in range(case.num_servers)
    ]
    part = torch.load(trained / f"{number}-{case.world_size - 1}.pt", weights_only=False)

    assert all(one.num_pulls == len(STEP_ROWS) * sum(case.num_replicas) for one in seen)
    assert all(0 < one.mean_steps <= one.max_steps <= case.bound for one in seen)
    assert part["losses"] != pytest.approx(losses, abs=1e-5)
