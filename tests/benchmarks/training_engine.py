"""The engine as the speed benchmark drives it: ready batches in memory, steps as one worker or two make them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.ctr_dnn import EMBEDDING_DIMENSION, HIDDEN_WIDTHS
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.job import TrainingConfig, default_microbatches
from heterps_core.training.loop import TrainingLoop
from heterps_core.training.pipeline.stage_model import StageModel, build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.transport.rank_layout import RankLayout
from heterps_core.transport.shared_memory_link import SharedMemoryLink
from infra.workspace import free_loopback_port
from tests.one_step import train_one_step

LEARNING_RATES = {"dense_learning_rate": 1e-3, "embedding_learning_rate": 0.05}
BATCH_SIZE = 4096
NUM_SLOTS, NUM_DENSE = 26, 13
DIMENSION, WIDTHS = EMBEDDING_DIMENSION, HIDDEN_WIDTHS
NUM_BATCHES = 8
LAST_LAYER = 2 * len(WIDTHS) + 1
STEPS_UNTIL_PEAK = 10
NUM_WORKERS = 2


def make_features(num_rows: int) -> FeatureSpec:
    """Return the slots of a table of about that many rows."""
    return FeatureSpec(
        num_dense=NUM_DENSE,
        slot_rows=(num_rows // NUM_SLOTS,) * NUM_SLOTS,
    )


def make_batches(
    num_rows: int, *, seed: int, batch_size: int = BATCH_SIZE, num_batches: int = NUM_BATCHES
) -> list[ClickBatch]:
    """Return batches whose ids are drawn evenly: the hardest case for caches."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch_size, NUM_SLOTS)
    return [
        ClickBatch(
            dense=torch.randn(batch_size, NUM_DENSE, generator=generator),
            ids=torch.randint(0, num_rows // NUM_SLOTS, shape, generator=generator),
            labels=torch.randint(0, 2, (batch_size,), generator=generator).float(),
        )
        for _ in range(num_batches)
    ]


def make_loop_step(features: FeatureSpec, batch_size: int) -> Callable[[ClickBatch], None]:
    """Return a step as the training loop of a single worker takes it, SGD for rows."""
    config = TrainingConfig(
        batch_size=batch_size,
        num_microbatches=default_microbatches(batch_size, num_stages=1),
        num_epochs=1,
        seed=0,
        embedding_optimizer="sgd",
    )
    model = build_stage_model("ctrdnn", features, config, [Stage(0, LAST_LAYER, "cpu", 1)])
    runner = StageRunner(model, config)
    # Batches are given, and none is read.
    loop = TrainingLoop(runner=runner, model=model, batches=None, dataset=None, config=config, run=None)
    cursors = map(partial(TrainingCursor, 0, 0), itertools.count())

    def step(batch: ClickBatch) -> None:
        microbatches = [
            MicroBatch(size, batch.rows(rows.first, rows.stop))
            for size, rows in runner.row_slices(batch_size, config.num_microbatches)
        ]
        loop.take_step(next(cursors), microbatches, num_steps=10**9)

    return step


def make_step(
    num_rows: int,
    *,
    precision: str,
    seed: int,
    replica: int = 0,
    group: ProcessGroup | None = None,
    num_replicas: int = 1,
    shares_memory: bool = False,
) -> Callable[[], None]:
    """Return a training step of one replica of a single stage; each call takes the next batch."""
    model, runner = _make_replica(num_rows, precision, seed, replica, group, num_replicas, shares_memory)
    parts = []
    for batch in make_batches(num_rows, seed=seed):
        ((size, rows),) = runner.row_slices(BATCH_SIZE, 1)
        parts.append(MicroBatch(size, batch.rows(rows.first, rows.stop)))
    upcoming = itertools.cycle(parts)

    def step() -> None:
        train_one_step(model, runner, [next(upcoming)], **LEARNING_RATES)

    return step


@contextmanager
def two_workers(num_rows: int, seed: int, *, shares_memory: bool) -> Iterator[Callable[[], None]]:
    """Yield a step of two processes of one thread, joined by gloo; they sleep between calls."""
    context = multiprocessing.get_context("spawn")
    port = free_loopback_port()
    ends, processes = [], []
    for rank in range(NUM_WORKERS):
        mine, theirs = context.Pipe()
        processes.append(
            context.Process(
                target=_work, args=(rank, port, theirs, num_rows, seed, shares_memory), daemon=True
            )
        )
        processes[-1].start()
        ends.append(mine)

    def step() -> None:
        for end in ends:
            end.send(True)
        for end in ends:
            end.recv()

    try:
        for end in ends:
            end.recv()
        yield step
    finally:
        for end in ends:
            end.send(False)
        for process in processes:
            process.join()


def measured_memory(num_rows: int, *, seed: int) -> tuple[int, int]:
    """Return the peak bytes of a fresh process that trains, and the bytes of its parameters and optimizer state."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_train_and_measure, (num_rows, seed))


def peak_memory_bytes() -> int:
    """Return the peak of this process alone; what getrusage says was handed down by the one that started it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _train_and_measure(num_rows: int, seed: int) -> tuple[int, int]:
    torch.set_num_threads(1)
    model, runner = _make_replica(num_rows, "float32", seed, 0, None, 1, False)
    for batch in make_batches(num_rows, seed=seed)[:STEPS_UNTIL_PEAK]:
        train_one_step(model, runner, [MicroBatch(BATCH_SIZE, batch)], **LEARNING_RATES)
    tensors = [tensor for table in model.tables.values() for tensor in table.tensors().values()]
    for layer in model.layers.values():
        tensors += layer.parameters()
    for state in model.dense_optimizer.state.values():
        tensors += state.values()
    return peak_memory_bytes(), sum(tensor.nbytes for tensor in tensors)


def _make_replica(
    num_rows: int,
    precision: str,
    seed: int,
    replica: int,
    group: ProcessGroup | None,
    num_replicas: int,
    shares_memory: bool,
) -> tuple[StageModel, StageRunner]:
    config = TrainingConfig(
        batch_size=BATCH_SIZE, num_microbatches=1, num_epochs=1, seed=seed, precision=precision
    )
    stages = [Stage(0, LAST_LAYER, "cpu", num_replicas)]
    layout = RankLayout((tuple(range(num_replicas)),))
    link = None
    if group is not None and shares_memory:
        link = SharedMemoryLink.connect(group, layout=layout, silence_limit_s=60.0)
        assert link is not None
    place = StagePlace(layout=layout, replica=replica, group=group, link=link)
    model = build_stage_model("ctrdnn", make_features(num_rows), config, stages, place)
    return model, StageRunner(model, config, place)


def _work(rank: int, port: int, end: Connection, num_rows: int, seed: int, shares_memory: bool) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        RANK=str(rank),
        WORLD_SIZE=str(NUM_WORKERS),
        LOCAL_WORLD_SIZE=str(NUM_WORKERS),
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    step = make_step(
        num_rows,
        precision="float32",
        seed=seed,
        replica=rank,
        group=dist.group.WORLD,
        num_replicas=NUM_WORKERS,
        shares_memory=shares_memory,
    )
    end.send(True)
    while end.recv():
        step()
        end.send(True)
    dist.destroy_process_group()
