"""Stages train on, whatever crosses between them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from heterps_core.data.batch import ClickBatch
from heterps_core.training.job import DELAYED, SYNC
from heterps_core.training.pipeline.stage_place import StagePlace, connect_neighbours
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.transport.rank_layout import RankLayout
from tests.bare_stage import CONFIG, bare_stage
from tests.worker_processes import run_in_processes

NUM_ROWS, WIDTH = 4_096, 1_024
"""Rows of a micro-batch and floats of each: 16 MiB, more than a connection takes before it is read."""

NUM_STEPS, NUM_MICROBATCHES = 3, 4


class Start(nn.Module):
    """The first layer: gives the same rows each time."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, activation: torch.Tensor | None) -> torch.Tensor:
        return self.scale * torch.ones(NUM_ROWS, 1)


class Sum(nn.Module):
    """The last layer of the second stage, and all of the third, which sends as much back."""

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        return activation.sum(1, keepdim=True)


def train_wide_stages(rank: int, update_mode: str) -> int:
    """Train all steps as one of three stages; return how many were trained."""
    layout = RankLayout(((0,), (1,), (2,)))
    layers = [Start(), nn.Identity(), Sum()][rank]
    neighbours = connect_neighbours(layout, rank=rank, shares_memory=False)
    place = StagePlace(layout=layout, stage=rank, neighbours=neighbours, silence_limit_s=10.0)
    stage = bare_stage([layers], input_width=WIDTH, output_width=1 if rank == 2 else WIDTH)
    runner = StageRunner(stage, replace(CONFIG, update_mode=update_mode), place)
    batch = ClickBatch(
        dense=torch.empty(NUM_ROWS, 0), ids=torch.empty(NUM_ROWS, 0), labels=torch.ones(NUM_ROWS)
    )
    microbatches = [MicroBatch(NUM_ROWS, batch)] * NUM_MICROBATCHES
    for step in range(NUM_STEPS):
        list(runner.train_step(microbatches, following=microbatches if step + 1 < NUM_STEPS else []))
        # Between steps workers agree whether to go on; rows for the next step are on their way meanwhile.
        dist.barrier()
    return NUM_STEPS


@pytest.mark.parametrize("update_mode", [SYNC, DELAYED])
def test_stages_train_on_where_messages_are_larger_than_connections_take(update_mode):
    assert run_in_processes(train_wide_stages, 3, update_mode) == [NUM_STEPS] * 3
