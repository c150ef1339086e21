"""What messages between stages cost, from two of the trainer's own runners with a small model cut in two.

They train as lone workers and as a pipeline in turns. The core time that the pipeline takes more, on the threads of
layers and on those of the transport, is that of its messages. How long a message is under way without a core comes
from messages there and back while nothing else is done.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.profiling.lone_worker import LoneRunner
from heterps_core.profiling.worker_costs import MessageCosts
from heterps_core.training.rank_layout import RankLayout
from heterps_core.training.shared_memory_boundary import SharedNeighbour, connect_neighbours
from heterps_core.training.stage_runner import MicroBatch, StageRunner
from heterps_core.units import BYTES_PER_FLOAT32

WIDTH = 256
MICROBATCH_ROWS = (32, 256, 1024)
"""32 KiB to 1 MiB: a narrow layer's micro-batch and a wide one's."""

NUM_MICROBATCHES = 4
NUM_ROUNDS, STEPS_OF_ROUND = 5, 6
"""The median round is taken; lone workers and pipeline train in each."""

NUM_ROUND_TRIPS = 80
LOW_QUANTILE = 0.2
"""Of round trips: many of the others waited for a core."""

TIMEOUT_S = 60.0
LAYOUT = RankLayout(((0,), (1,)))


class CoreSeconds(NamedTuple):
    """Core time of the threads that run layers, and of all others."""

    layers: float
    others: float

    @classmethod
    def so_far(cls) -> CoreSeconds:
        """Return those of this process since its start."""
        own = time.thread_time()
        return cls(own, time.process_time() - own)

    def __sub__(self, other: CoreSeconds) -> CoreSeconds:
        """Return what passed since another."""
        return CoreSeconds(self.layers - other.layers, self.others - other.others)


class _FirstLayer(nn.Module):
    """Stands where embeddings are: its rows come from nowhere."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._rows_BW = torch.randn(num_rows, WIDTH)

    def forward(self, _: None) -> Tensor:
        return self._rows_BW


class MessageSeconds(NamedTuple):
    """What messages of each of `MICROBATCH_ROWS` took; core seconds: one end, which sends one and receives one."""

    core: list[CoreSeconds]
    one_way: list[float]
    """On the clock, from asking to send to having it."""


def measure_messages(rank: int) -> MessageSeconds | None:
    """Measure between ranks 0 and 1, while the other processes of the world wait; all of them call this.

    Returns:
        None on the others.
    """
    neighbours = connect_neighbours(LAYOUT, rank=rank)
    if rank > 1:
        return None
    pairs = [_Runners(rank, num_rows, neighbours) for num_rows in MICROBATCH_ROWS]
    return MessageSeconds(
        core=[pair.core_seconds() for pair in pairs], one_way=[pair.one_way_seconds() for pair in pairs]
    )


def message_costs(ends: Sequence[MessageSeconds]) -> MessageCosts:
    """Return what messages cost, from what both ends measured."""
    layers, others, one_way = (
        [fmean(values) for values in zip(*of_ends, strict=True)]
        for of_ends in (
            [[core.layers for core in end.core] for end in ends],
            [[core.others for core in end.core] for end in ends],
            [end.one_way for end in ends],
        )
    )
    call, transport, arrival = (_line(seconds) for seconds in (layers, others, one_way))
    return MessageCosts(
        call_seconds=call[0],
        call_seconds_per_byte=call[1],
        transport_seconds=transport[0],
        transport_seconds_per_byte=transport[1],
        arrival_seconds=arrival[0],
        arrival_seconds_per_byte=arrival[1],
    )


def _line(seconds: Sequence[float]) -> tuple[float, float]:
    """Return fixed seconds and seconds for each byte, neither below 0."""
    num_bytes = [num_rows * WIDTH * BYTES_PER_FLOAT32 for num_rows in MICROBATCH_ROWS]
    per_byte, fixed = np.polyfit(num_bytes, seconds, 1)
    return max(float(fixed), 0.0), max(float(per_byte), 0.0)


class _Runners:
    """One end of a small model that is cut in two, as a lone worker and as a stage of a pipeline."""

    def __init__(self, rank: int, num_rows: int, neighbours: Mapping[int, SharedNeighbour]) -> None:
        self._rank, self._num_rows = rank, num_rows
        layers: list[nn.Module] = [
            [_FirstLayer(num_rows), nn.Linear(WIDTH, WIDTH), nn.ReLU()],
            [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)],
        ][rank]
        self._lone, self._piped = (
            kind(
                layers,
                layout=LAYOUT,
                stage=rank,
                replica=0,
                input_width=rank * WIDTH,
                output_width=WIDTH,
                group=None,
                silence_limit_s=TIMEOUT_S,
                neighbours=neighbours,
            )
            for kind in (LoneRunner, StageRunner)
        )

    def core_seconds(self) -> CoreSeconds:
        """Return the core seconds of one message sent and one received."""
        no_columns = torch.empty(self._num_rows, 0)
        batch = ClickBatch(dense=no_columns, ids=no_columns.long(), labels=torch.zeros(self._num_rows))
        microbatches = [MicroBatch(self._num_rows, batch)] * NUM_MICROBATCHES
        added = []
        for _ in range(NUM_ROUNDS):
            spent = []
            for runner in (self._lone, self._piped):
                before = CoreSeconds.so_far()
                for _ in range(STEPS_OF_ROUND):
                    runner.train_step(microbatches)
                spent.append(CoreSeconds.so_far() - before)
            added.append(spent[1] - spent[0])
        num_messages = STEPS_OF_ROUND * NUM_MICROBATCHES
        return CoreSeconds(
            median(seconds.layers for seconds in added) / num_messages,
            median(seconds.others for seconds in added) / num_messages,
        )

    def one_way_seconds(self) -> float:
        """Return how long a message takes while nothing else is done."""
        boundary = self._piped._boundaries[0]
        rows_BW = torch.zeros(self._num_rows, WIDTH)
        seconds = []
        for _ in range(NUM_ROUND_TRIPS):
            receiving = boundary.receive(self._num_rows)
            started_s = time.perf_counter()
            if self._rank == 0:
                boundary.send(rows_BW, self._num_rows)
            receiving.wait()
            if self._rank == 1:
                boundary.send(rows_BW, self._num_rows)
            boundary.wait_until_sent()
            seconds.append(time.perf_counter() - started_s)
        return float(np.quantile(seconds, LOW_QUANTILE)) / 2
