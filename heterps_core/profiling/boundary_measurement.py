"""What a boundary between two stages costs the processor of a worker, measured with the trainer's own stages.

Two processes train the two halves of a small model, each also the whole of it alone; the difference is the
boundary's: its messages, and the passes that a second stage begins and ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.profiling.layer_profile import BoundaryCost
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.pipeline.stage_place import ALONE, StagePlace, connect_neighbours
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.transport.rank_layout import RankLayout
from heterps_core.units import BYTES_PER_FLOAT32

NUM_MICROBATCHES, NUM_ROWS = 8, 64
WIDTHS = (8, 512)
"""Of the activation that crosses: 2 KiB a message show the cost of a micro-batch, 128 KiB that of bytes."""

NUM_ROUNDS, STEPS_PER_ROUND, WARMUP_STEPS = 5, 3, 2
LEARNING_RATE = 1e-6
_FEATURES = FeatureSpec(num_dense=1, slot_rows=(16,))
_HALVES = (Stage(0, 2, "first", 1), Stage(3, 3, "second", 1))
_WHOLE = (Stage(0, 3, "whole", 1),)


class _Extra(NamedTuple):
    """What a boundary adds to a step."""

    num_bytes: float
    seconds: float
    """Mean processor time of the workers on both sides."""


def measure_boundary(rank: int, *, shares_memory: bool) -> BoundaryCost:
    """Return the cost of a boundary between the two processes of the world, which both call this.

    Messages go through the memory of this machine, where it can be shared, or over sockets.
    """
    layout = RankLayout(((0,), (1,)))
    neighbours = connect_neighbours(layout, rank=rank) if shares_memory else {}
    place = StagePlace(layout=layout, stage=rank, neighbours=neighbours)
    with _one_thread():
        small, large = (_extra(place, width) for width in WIDTHS)
    for peer in (peer for neighbour in neighbours.values() for peer in neighbour.peers):
        peer.connection.close()
    byte_seconds = max((large.seconds - small.seconds) / (large.num_bytes - small.num_bytes), 0.0)
    microbatch_seconds = max(small.seconds - byte_seconds * small.num_bytes, 0.0) / NUM_MICROBATCHES
    return BoundaryCost(microbatch_seconds=microbatch_seconds, byte_seconds=byte_seconds)


@contextmanager
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _extra(place: StagePlace, width: int) -> _Extra:
    difference_s = torch.tensor(
        _step_seconds(_HALVES, place, width) - _step_seconds(_WHOLE, ALONE, width) / 2, dtype=torch.float64
    )
    dist.all_reduce(difference_s)
    # Activations cross forward, their gradients back.
    num_bytes = 2 * NUM_MICROBATCHES * NUM_ROWS * width * BYTES_PER_FLOAT32
    return _Extra(num_bytes, difference_s.item() / place.num_stages)


def _step_seconds(stages: tuple[Stage, ...], place: StagePlace, width: int) -> float:
    """Return the least processor time of a step in this process."""
    config = TrainingConfig(
        batch_size=NUM_MICROBATCHES * NUM_ROWS, num_microbatches=NUM_MICROBATCHES, num_epochs=1, seed=0
    )
    model = build_stage_model(
        f"ctrdnn(hidden_widths={width}, embedding_dim=1)", _FEATURES, config, stages, place
    )
    runner = StageRunner(model, config, place)
    batch = ClickBatch.from_numpy(
        np.zeros((NUM_ROWS, 1), dtype=np.float32),
        np.arange(NUM_ROWS).reshape(-1, 1) % _FEATURES.total_rows,
        np.zeros(NUM_ROWS, dtype=np.float32),
    )
    microbatches = [MicroBatch(NUM_ROWS, batch)] * NUM_MICROBATCHES
    marks_s = []
    for step in range(WARMUP_STEPS + NUM_ROUNDS * STEPS_PER_ROUND + 1):
        if step >= WARMUP_STEPS and (step - WARMUP_STEPS) % STEPS_PER_ROUND == 0:
            marks_s.append(time.process_time())
        for _ in runner.train_step(microbatches):
            pass
        model.update_rows(LEARNING_RATE)
    return min(after - before for before, after in pairwise(marks_s)) / STEPS_PER_ROUND
