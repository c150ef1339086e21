"""Processor time of a worker for a boundary between two stages, measured with the trainer's own stages.

Two processes train the two halves of a small model, each also the whole of it alone; the difference is the
boundary's: its messages, and the passes that a second stage begins and ends. Between messages workers compute, which
takes the caches: without, a micro-batch took a half to a quarter of the time (load 25, 2026-11-26).
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from heterps_core.compute_device import one_torch_thread
from heterps_core.data.features import FeatureSpec
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.profiling.layer_profile import BoundaryCost
from heterps_core.profiling.measurement.profiling_input import plain_batch
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.pipeline.stage_place import ALONE, StagePlace, close, connect_neighbours
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.transport.rank_layout import RankLayout
from heterps_core.units import BYTES_PER_FLOAT32

NUM_MICROBATCHES = 8
NUM_ROUNDS, STEPS_PER_ROUND, WARMUP_STEPS = 5, 3, 2
LEARNING_RATE = 1e-6
_FEATURES = FeatureSpec(num_dense=1, slot_rows=(16,))


class _Halves(NamedTuple):
    """A model of fully connected layers in two stages."""

    hidden_widths: tuple[int, ...]
    num_hidden: int
    """Hidden layers of the first stage; the last of them crosses."""

    num_rows: int
    """Rows of a micro-batch."""

    @property
    def model(self) -> str:
        """Name of the model."""
        return f"ctrdnn(hidden_widths={'-'.join(map(str, self.hidden_widths))}, embedding_dim=1)"

    @property
    def stages(self) -> tuple[Stage, Stage]:
        """The halves; an embedding stands before the hidden layers, each of which has an activation."""
        cut, last = 2 * self.num_hidden, 2 * len(self.hidden_widths) + 1
        return Stage(0, cut, "first", 1), Stage(cut + 1, last, "second", 1)

    @property
    def num_bytes(self) -> int:
        """Bytes that cross in a step: activations forward, their gradients back."""
        width = self.hidden_widths[self.num_hidden - 1]
        return 2 * NUM_MICROBATCHES * self.num_rows * width * BYTES_PER_FLOAT32


_NARROW, _WIDE = _Halves((8,), 1, 64), _Halves((512,), 1, 64)
"""They differ in what crosses: 2 and 128 KiB a message."""

_COMPUTING = _Halves((256, 8, 256), 2, 256)


def measure_boundary(rank: int, *, shares_memory: bool) -> BoundaryCost:
    """Return the cost of a boundary between the two processes of the world, which both call this.

    Messages go through the memory of this machine, where it can be shared, or over sockets.
    """
    layout = RankLayout(((0,), (1,)))
    neighbours = connect_neighbours(layout, rank=rank, shares_memory=shares_memory)
    place = StagePlace(layout=layout, stage=rank, neighbours=neighbours)
    with one_torch_thread():
        narrow_s, wide_s, computing_s = (_extra_seconds(place, each) for each in (_NARROW, _WIDE, _COMPUTING))
    for neighbour in neighbours.values():
        close(neighbour)
    byte_seconds = max((wide_s - narrow_s) / (_WIDE.num_bytes - _NARROW.num_bytes), 0.0)
    messages_s = max(computing_s - byte_seconds * _COMPUTING.num_bytes, 0.0)
    return BoundaryCost(microbatch_seconds=messages_s / NUM_MICROBATCHES, byte_seconds=byte_seconds)


def _extra_seconds(place: StagePlace, halves: _Halves) -> float:
    """Return what the boundary adds to a step, as the mean processor time of the workers on both sides."""
    first, second = halves.stages
    whole = Stage(first.first_layer, second.last_layer, "whole", 1)
    two_s, alone_s = _step_seconds(halves, (first, second), place), _step_seconds(halves, (whole,), ALONE)
    difference_s = torch.tensor(two_s - alone_s / 2, dtype=torch.float64)
    dist.all_reduce(difference_s)
    return difference_s.item() / 2


def _step_seconds(halves: _Halves, stages: tuple[Stage, ...], place: StagePlace) -> float:
    """Return the least processor time of a step in this process."""
    num_rows = halves.num_rows
    config = TrainingConfig(
        batch_size=NUM_MICROBATCHES * num_rows, num_microbatches=NUM_MICROBATCHES, num_epochs=1, seed=0
    )
    model = build_stage_model(halves.model, _FEATURES, config, stages, place)
    runner = StageRunner(model, config, place)
    batch = plain_batch(_FEATURES, num_rows=num_rows)
    microbatches = [MicroBatch(num_rows, batch)] * NUM_MICROBATCHES
    marks_s = []
    for step in range(WARMUP_STEPS + NUM_ROUNDS * STEPS_PER_ROUND + 1):
        if step >= WARMUP_STEPS and (step - WARMUP_STEPS) % STEPS_PER_ROUND == 0:
            marks_s.append(time.process_time())
        for _ in runner.train_step(microbatches):
            pass
        model.update_rows(LEARNING_RATE)
    return min(after - before for before, after in pairwise(marks_s)) / STEPS_PER_ROUND
