"""Measures what the exchange of rows costs a replica's processor, by 2 to 16 processes of this machine over loopback.

Run as a program by `measuring_process`, on a folder. The processes are forked from this one, which has loaded torch.
Each makes the steps of tables in the trainer, without layers beside them: a thread requests the rows of the next
batch, and micro-batches look them up. More processes than cores take turns, so the processor time of all threads is
measured. All numbers of processes, a single one among them, take turns round after round, so that a busy second slows
all of them; then their differences are true, and medians of rounds suffice.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from heterps_core.embeddings.row_exchange import LookupRows, TablePeers
from heterps_core.embeddings.row_optimizers import get_row_optimizer
from heterps_core.embeddings.sharded_table import ShardedTable, exchange_row_numbers
from heterps_core.models.tracing import BYTES_PER_ROW_NUMBER
from heterps_core.profiling.link_measurement import TIMEOUT
from heterps_core.profiling.measuring_process import RESULT_NAME
from heterps_core.profiling.replica_path import PathSample, ReplicaPath, fitted_path
from heterps_core.training.pipeline.stage_layers import keep_freed_memory
from heterps_core.units import BYTES_PER_FLOAT32

NUM_PROCESSES = (16, 4, 2)
"""Falling: a process that is not among the last ones has the same first settings as all others."""
BATCH_SIZE, NUM_MICROBATCHES, NUM_COLUMNS = 4096, 4, 26
WIDTHS = ((1,), (16,), (1, 1))
"""Of the rows of each table: short rows show the cost of messages, long ones of bytes, two tables of a table."""

ROWS_PER_COLUMN = 10_000
"""17 MB of rows of 16 numbers, beyond the caches of a core."""

NUM_ROUNDS, STEPS_PER_ROUND, NUM_BATCHES = 7, 2, 4
LEARNING_RATE = 1e-6


class _Measured(NamedTuple):
    """Steps of tables among so many processes, in one of them."""

    num_processes: int
    num_tables: int
    num_bytes: float
    seconds: float
    alone_seconds: float | None
    """Of a single process with as many samples; only the first process measures it."""


def measure_replica_path() -> ReplicaPath:
    """Measure all numbers of processes, and return the law that fits them best."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="heterps-replicas-") as path:
        folder = Path(path)
        processes = [
            context.Process(target=_measure_replica, args=(folder, rank))
            for rank in range(max(NUM_PROCESSES))
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        found = [json.loads((folder / str(rank)).read_text()) for rank in range(len(processes))]
    samples = []
    for index, first in enumerate(_Measured(*fields) for fields in found[0]):
        steps = [_Measured(*process[index]) for process in found[: first.num_processes]]
        assert first.alone_seconds is not None
        samples.append(
            PathSample(
                first.num_processes,
                first.num_tables,
                statistics.mean(step.num_bytes for step in steps),
                first.alone_seconds,
                statistics.mean(step.seconds for step in steps),
            )
        )
    return fitted_path(samples, measured_at=datetime.now(UTC).isoformat(timespec="seconds"))


def _measure_replica(folder: Path, rank: int) -> None:
    # Otherwise gloo binds to what the host name resolves to, which on a laptop may be nothing.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=max(NUM_PROCESSES),
        timeout=TIMEOUT,
    )
    keep_freed_memory(shares_heap=False)
    together: list[_TableSteps] = []
    alone: list[_TableSteps] = []
    with ThreadPoolExecutor(1) as feed:
        for num_processes in NUM_PROCESSES:
            group = dist.new_group(list(range(num_processes)))
            if rank < num_processes:
                peers = TablePeers.connect(group)
                sizes = [(num_processes, widths) for widths in WIDTHS]
                together += [_TableSteps(feed, peers, *size, seed=rank) for size in sizes]
                if rank == 0:
                    alone += [_TableSteps(feed, None, *size, seed=rank) for size in sizes]
        # The first process is in all groups, so the others wait while it works alone.
        rounds = [[steps.seconds() for steps in (*together, *alone)] for _ in range(NUM_ROUNDS)]
    medians = [statistics.median(each) for each in zip(*rounds, strict=True)]
    found = [
        _Measured(steps.num_processes, steps.num_tables, steps.num_bytes, seconds, alone_s)
        for steps, seconds, alone_s in zip_longest(
            together, medians[: len(together)], medians[len(together) :]
        )
    ]
    (folder / str(rank)).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


class _TableSteps:
    """Tables of one process that a batch looks up, and its share of batches and rows."""

    def __init__(
        self,
        feed: ThreadPoolExecutor,
        peers: TablePeers | None,
        num_processes: int,
        widths: Sequence[int],
        *,
        seed: int,
    ) -> None:
        self.num_processes, self.num_tables = num_processes, len(widths)
        self._feed = feed
        self._num_rows = BATCH_SIZE // num_processes
        self._tables = [
            ShardedTable(
                name=f"measured_{index}",
                num_rows=ROWS_PER_COLUMN * NUM_COLUMNS,
                dimension=width,
                optimizer=get_row_optimizer("rowwise-adagrad")(),
                seed=0,
                initial_standard_deviation=0.1,
                peers=peers,
            )
            for index, width in enumerate(widths)
        ]
        size = (NUM_BATCHES, self._num_rows, NUM_COLUMNS)
        drawn = np.random.default_rng(seed).integers(0, ROWS_PER_COLUMN, size)
        self._batches = torch.from_numpy(drawn + ROWS_PER_COLUMN * np.arange(NUM_COLUMNS))
        num_distinct = statistics.mean(len(torch.unique(rows_BS)) for rows_BS in self._batches)
        bytes_of_row = (BYTES_PER_ROW_NUMBER + 2 * width * BYTES_PER_FLOAT32 for width in widths)
        self.num_bytes = num_distinct * sum(bytes_of_row)

    def seconds(self) -> float:
        """Return the processor time of a step, the mean of some after one that warms up."""
        ahead = self._announce(0)
        for step in range(STEPS_PER_ROUND + 1):
            if step == 1:
                started_s = time.process_time()
            announced = ahead.result()
            ahead = self._announce(step + 1)
            self._take_step(announced)
        taken_s = time.process_time() - started_s
        ahead.result()
        return taken_s / STEPS_PER_ROUND

    def _announce(self, step: int) -> Future[list[LookupRows]]:
        rows_BS = self._batches[step % NUM_BATCHES]
        return self._feed.submit(exchange_row_numbers, [(table, rows_BS) for table in self._tables])

    def _take_step(self, announced: Sequence[LookupRows]) -> None:
        size = self._num_rows // NUM_MICROBATCHES
        found = []
        for first in range(0, self._num_rows, size):
            for table, of_batch in zip(self._tables, announced, strict=True):
                table.expect(of_batch.part(first, first + size))
                found.append(table.lookup(None))
        for rows_BX in found:
            rows_BX.backward(torch.full_like(rows_BX, LEARNING_RATE))  # type: ignore[no-untyped-call]
        for table in self._tables:
            table.apply_gradients(learning_rate=LEARNING_RATE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = Path(sys.argv[1]) / RESULT_NAME
    result.write_text(json.dumps(measure_replica_path().to_json()), encoding="utf-8")
