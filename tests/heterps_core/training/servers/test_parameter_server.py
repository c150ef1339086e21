"""Workers that look rows up in parameter servers learn what one process learns, as stale as the bound allows."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from heterps_core.compute_device import CPU
from heterps_core.data.features import FeatureSpec
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_model import StageModel, build_stage_model
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.training.servers.parameter_server import ParameterServer
from heterps_core.training.servers.parameter_server_client import PulledTable
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.transport.rank_layout import RankLayout
from tests.heterps_core.training.cut_models import (
    DENSE_LEARNING_RATE,
    EMBEDDING_LEARNING_RATE,
    FEATURES,
    HELD_OUT,
    NUM_HELD_OUT_ROWS,
    SEED,
    STEP_ROWS,
    can_run,
    check_learned,
    initial_chain,
    learned_by_one_process,
    learned_part,
    make_batch,
    numbers_of,
    take,
)
from tests.worker_processes import run_in_processes


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
    def num_cards(self) -> int:
        return self.num_replicas[0] if self.on_cuda else 0

    @property
    def world_size(self) -> int:
        return self.num_servers + sum(self.num_replicas)

    @property
    def config(self) -> TrainingConfig:
        return TrainingConfig(
            batch_size=48,
            num_microbatches=self.num_microbatches,
            num_epochs=1,
            seed=SEED,
            dense_optimizer="sgd",
            dense_learning_rate=DENSE_LEARNING_RATE,
            embedding_optimizer="sgd",
            embedding_learning_rate=EMBEDDING_LEARNING_RATE,
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


def microbatches_of(model: StageModel, runner: StageRunner, step: int, num_rows: int) -> list[MicroBatch]:
    """Cut a batch, and ask for what it looks up where it is one to train on (`step` is not negative)."""
    batch = make_batch(step, num_rows)
    parts, sizes = [], []
    for size, rows in runner.row_slices(num_rows, model_microbatches):
        parts.append(take(batch, rows.first, rows.stop))
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
        if not can_run(case):
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
        model.apply_gradients(
            dense_learning_rate=DENSE_LEARNING_RATE, embedding_learning_rate=EMBEDDING_LEARNING_RATE
        )
    model_microbatches = 2
    logits = runner.predict(microbatches_of(model, runner, HELD_OUT, NUM_HELD_OUT_ROWS))
    for table in model.pulled_tables:
        table.close()
    return learned_part(model, runner, losses, logits, num_microbatches=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all cases in one group of processes; starting one for each would take most of the time."""
    folder = tmp_path_factory.mktemp("trained")
    run_in_processes(train_all, max(case.world_size for case in CASES), str(folder))
    return folder


@pytest.mark.parametrize("number", numbers_of(FRESH))
def test_without_staleness_hybrid_learns_what_one_process_learns(number: int, trained: Path) -> None:
    case = FRESH[number]
    parts = [
        torch.load(trained / f"{number}-{rank}.pt", weights_only=False) for rank in range(case.world_size)
    ]

    check_learned(parts, case.model)
    assert all(part["staleness"].max_steps == 0 for part in parts[: case.num_servers])
    num_rows = sum(rows.num_rows for part in parts for rows, _ in part["shards"].values())
    tables = [layer for layer in initial_chain(case.model) if isinstance(layer, SlotEmbedding)]
    assert num_rows == sum(layer.num_rows for layer in tables)


@pytest.mark.parametrize("case", STALE, ids=str)
def test_rows_are_never_staler_than_the_bound(case: Case, trained: Path) -> None:
    number = CASES.index(case)
    losses = learned_by_one_process(case.model).losses
    seen = [
        torch.load(trained / f"{number}-{rank}.pt", weights_only=False)["staleness"]
        for rank in range(case.num_servers)
    ]
    part = torch.load(trained / f"{number}-{case.world_size - 1}.pt", weights_only=False)

    assert all(one.num_pulls == len(STEP_ROWS) * sum(case.num_replicas) for one in seen)
    assert all(0 < one.mean_steps <= one.max_steps <= case.bound for one in seen)
    assert part["losses"] != pytest.approx(losses, abs=1e-5)
