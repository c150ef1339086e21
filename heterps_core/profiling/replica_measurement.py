"""Measures what the exchange of rows costs a replica's processor, by 2 to 16 processes of this machine over loopback.

Run as a program by `measuring_process`, on a folder. The processes are forked from this one, which has loaded torch.
Each makes the steps of a table in the trainer, without layers beside it: a thread requests the rows of the next
batch, and micro-batches look them up. More processes than cores take turns, so the processor time of all threads is
measured; the least of some rounds is what other programs disturbed least.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from heterps_core.embeddings.row_exchange import LookupRows, TablePeers
from heterps_core.embeddings.row_optimizers import get_row_optimizer
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.models.tracing import BYTES_PER_ROW_NUMBER
from heterps_core.profiling.link_measurement import TIMEOUT
from heterps_core.profiling.measuring_process import RESULT_NAME
from heterps_core.profiling.replica_path import PathSample, ReplicaPath, fitted_path
from heterps_core.units import BYTES_PER_FLOAT32

NUM_PROCESSES = (2, 4, 16)
BATCH_SIZE, NUM_MICROBATCHES, NUM_COLUMNS = 4096, 4, 26
WIDTHS = (1, 16)
"""Of a row: short rows show the cost of messages, long ones that of bytes."""

ROWS_PER_COLUMN = 10_000
"""17 MB of rows of 16 numbers, beyond the caches of a core."""

NUM_ROUNDS, STEPS_PER_ROUND, WARMUP_STEPS, NUM_BATCHES = 6, 2, 2, 4
LEARNING_RATE = 1e-6


class _TableStep(NamedTuple):
    """A step of a table in one process."""

    num_bytes: float
    seconds: float


def measure_replica_path() -> ReplicaPath:
    """Measure all numbers of processes, and return the law that fits them best."""
    samples = []
    for num_processes in NUM_PROCESSES:
        alone = [_time_steps(None, width, num_processes=num_processes, seed=0) for width in WIDTHS]
        by_process = _measure_together(num_processes)
        for index, single in enumerate(alone):
            steps = [process[index] for process in by_process]
            num_bytes, seconds = np.mean(steps, axis=0).tolist()
            samples.append(PathSample(num_processes, num_bytes, single.seconds, seconds))
    return fitted_path(samples, measured_at=datetime.now(UTC).isoformat(timespec="seconds"))


def _measure_together(num_processes: int) -> list[list[_TableStep]]:
    """Return the steps of each process, one for each width."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="heterps-replicas-") as folder:
        processes = [
            context.Process(target=_measure_replica, args=(Path(folder), rank, num_processes))
            for rank in range(num_processes)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        found = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(num_processes)]
    return [[_TableStep(*step) for step in steps] for steps in found]


def _measure_replica(folder: Path, rank: int, num_processes: int) -> None:
    # Otherwise gloo binds to what the host name resolves to, which on a laptop may be nothing.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=num_processes,
        timeout=TIMEOUT,
    )
    assert dist.group.WORLD is not None
    peers = TablePeers.connect(dist.group.WORLD)
    steps = [_time_steps(peers, width, num_processes=num_processes, seed=rank) for width in WIDTHS]
    (folder / str(rank)).write_text(json.dumps(steps), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _time_steps(peers: TablePeers | None, width: int, *, num_processes: int, seed: int) -> _TableStep:
    """Return the least step of the rounds in this process, with its share of a batch and of the table's rows."""
    optimizer = get_row_optimizer("rowwise-adagrad")()
    whole: dict[str, Any] = {"name": "measured", "dimension": width, "optimizer": optimizer, "seed": 0}
    num_rows = ROWS_PER_COLUMN * NUM_COLUMNS
    table = ShardedTable(num_rows=num_rows, initial_standard_deviation=0.1, peers=peers, **whole)
    size = (NUM_BATCHES, BATCH_SIZE // num_processes, NUM_COLUMNS)
    drawn = np.random.default_rng(seed).integers(0, ROWS_PER_COLUMN, size)
    batches = torch.from_numpy(drawn + ROWS_PER_COLUMN * np.arange(NUM_COLUMNS))
    marks_s = []
    with ThreadPoolExecutor(1) as feed:
        ahead = feed.submit(table.exchange_row_numbers, batches[0])
        for step in range(WARMUP_STEPS + NUM_ROUNDS * STEPS_PER_ROUND + 1):
            if step >= WARMUP_STEPS and (step - WARMUP_STEPS) % STEPS_PER_ROUND == 0:
                marks_s.append(time.process_time())
            announced = ahead.result()
            ahead = feed.submit(table.exchange_row_numbers, batches[(step + 1) % NUM_BATCHES])
            _take_step(table, announced, size[1])
    num_distinct = np.mean([len(torch.unique(rows_BS)) for rows_BS in batches])
    least_s = min(after - before for before, after in pairwise(marks_s)) / STEPS_PER_ROUND
    bytes_per_row = BYTES_PER_ROW_NUMBER + 2 * width * BYTES_PER_FLOAT32
    return _TableStep(float(num_distinct) * bytes_per_row, least_s)


def _take_step(table: ShardedTable, announced: LookupRows, num_rows: int) -> None:
    part = num_rows // NUM_MICROBATCHES
    found = []
    for first in range(0, num_rows, part):
        table.expect(announced.part(first, first + part))
        found.append(table.lookup(None))
    for rows_BX in found:
        rows_BX.backward(torch.full_like(rows_BX, LEARNING_RATE))  # type: ignore[no-untyped-call]
    table.apply_gradients(learning_rate=LEARNING_RATE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = Path(sys.argv[1]) / RESULT_NAME
    result.write_text(json.dumps(measure_replica_path().to_json()), encoding="utf-8")
