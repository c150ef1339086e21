"""How long a neighbour is waited for: longer where steps are slow, as the model itself has shown."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from heterps_core.compute_device import CPU
from heterps_core.data.batch import ClickBatch
from heterps_core.training.pipeline.stage_place import StagePlace, connect_neighbours
from heterps_core.training.pipeline.stage_runner import (
    MicroBatch,
    StageRunner,
)
from heterps_core.transport.rank_layout import RankLayout
from tests.bare_stage import CONFIG, bare_stage
from tests.worker_processes import run_in_processes

NUM_ROWS = 8
LIMIT_S = 4.0
SECONDS_OF_STEPS = (0.0, 1.6, 8.0)
"""The last takes twice the limit, and five times the slowest step before it."""


class Start(nn.Module):
    """The first layer: gives the same rows at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(NUM_ROWS, 4))

    def forward(self, activation: torch.Tensor | None) -> torch.Tensor:
        return self.rows * 1.0


class Slow(nn.Module):
    """Takes as long as it is asked to, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = iter(SECONDS_OF_STEPS)

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        time.sleep(next(self.seconds))
        return activation


def train_with_slow_steps(rank: int, is_in_shared_memory: bool) -> int:
    """Train all steps as one of two stages; return how many were trained."""
    layout = RankLayout(((0,), (1,)))
    layers: list[nn.Module] = [Start()] if rank == 0 else [Slow(), nn.Linear(4, 1)]
    neighbours = connect_neighbours(layout, rank=rank, device=CPU, shares_memory=is_in_shared_memory)
    place = StagePlace(layout=layout, stage=rank, neighbours=neighbours, silence_limit_s=LIMIT_S)
    stage = bare_stage(layers, input_width=4 * rank, output_width=4 - 3 * rank)
    runner = StageRunner(stage, CONFIG, place)
    batch = ClickBatch(
        dense=torch.empty(NUM_ROWS, 0), ids=torch.empty(NUM_ROWS, 0), labels=torch.ones(NUM_ROWS)
    )
    for _ in SECONDS_OF_STEPS:
        list(runner.train_step([MicroBatch(NUM_ROWS, batch)]))
    return len(SECONDS_OF_STEPS)


@pytest.mark.parametrize("is_in_shared_memory", [False, True], ids=["by messages", "in shared memory"])
@pytest.mark.weekly
def test_a_neighbour_whose_steps_are_slow_is_waited_for_longer_than_the_limit(is_in_shared_memory):
    assert run_in_processes(train_with_slow_steps, 2, is_in_shared_memory) == [3, 3]
