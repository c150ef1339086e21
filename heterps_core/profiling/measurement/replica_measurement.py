"""Measures the processor time of a replica's exchange of rows, by 2 to 24 processes of this machine over loopback.

Run as a program by `measuring_process`, on a folder. The processes are forked from this one, which has loaded torch.
They are connected as processes of different machines are. Each makes the steps of tables in the trainer, without
layers beside them: a thread requests the rows of batches to come and cuts the next one, and micro-batches look the
rows up. More processes than cores take turns, so the processor time of all threads is measured. All numbers of
processes, a single one among them, take turns round after round, so that a busy second slows all of them, and the
medians of the rounds can be compared.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

# The first backward pass imports it, which takes each process 0.3 s where it is not there before the fork.
import torch.fx.experimental.symbolic_shapes
from torch.multiprocessing.spawn import start_processes

from heterps_core.compute_device import CPU
from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_exchange import TablePeers
from heterps_core.embeddings.row_optimizers import get_row_optimizer
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.profiling.measurement.layer_profiler import exchanged_bytes
from heterps_core.profiling.measurement.link_measurement import TIMEOUT
from heterps_core.profiling.measuring_process import RESULT_NAME
from heterps_core.profiling.replica_path import PathSample, fitted_path
from heterps_core.training.gradients.optimizers import get_dense_optimizer
from heterps_core.training.job import batches_at_once
from heterps_core.training.pipeline.stage_exchange import batch_slices
from heterps_core.training.pipeline.stage_layers import keep_freed_memory
from heterps_core.training.pipeline.stage_model import StageModel
from heterps_core.training.pipeline.stage_runner import MicroBatch
from heterps_core.training.replica_batches import Announced, BatchFeed, cut_batch, request_rows
from heterps_core.transport.json_messages import gather_json

NUM_PROCESSES = (24, 4, 2)
"""Falling, so that the settings of a process are the first ones of all settings."""

BATCH_SIZE, NUM_MICROBATCHES, NUM_COLUMNS = 4096, 4, 26
WIDTHS = ((1,), (16,), (16, 1))
"""The width of the rows of each table: the tables of lr, CTR-DNN and wide-deep."""

ROWS_PER_COLUMN = 10_000
"""17 MB of rows of 16 numbers, beyond the caches of a core."""

NUM_ROUNDS, LEAST_STEPS = 3, 4
"""A round has all batches that are requested together, as the thread that requests lengthens the steps beside it:
requests made before the steps leave out up to a fifth of an exchange among 24 replicas."""

LEARNING_RATE = 1e-6


def _measure_replica(rank: int, folder: Path) -> None:
    """Take steps with the other processes; the first one writes the law that fits the steps of all best."""
    # Otherwise gloo binds to the address of the host name, which a laptop may lack.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=max(NUM_PROCESSES),
        timeout=TIMEOUT,
    )
    keep_freed_memory(shares_heap=False)
    together: list[_ReplicaSteps] = []
    alone: list[_ReplicaSteps] = []
    for num_processes in NUM_PROCESSES:
        group = dist.new_group(list(range(num_processes)))
        if rank < num_processes:
            for widths in WIDTHS:
                peers = TablePeers.connect(group, uses_unix=False)
                together.append(_ReplicaSteps(peers, num_processes, widths, seed=rank))
                if rank == 0:
                    alone.append(_ReplicaSteps(None, num_processes, widths, seed=rank))
    # The first process is in all groups, so the others wait while it works alone.
    rounds = [[steps.seconds() for steps in (*together, *alone)] for _ in range(NUM_ROUNDS)]
    medians = [statistics.median(each) for each in zip(*rounds, strict=True)]
    own = [(steps.num_bytes, seconds) for steps, seconds in zip(together, medians, strict=False)]
    by_process = gather_json(own, None)
    if rank == 0:
        samples = []
        for index, (steps, alone_s) in enumerate(zip(together, medians[len(together) :], strict=True)):
            measured = [process[index] for process in by_process[: steps.num_processes]]
            num_bytes, seconds = np.mean(measured, axis=0).tolist()
            size = (BATCH_SIZE, steps.num_processes, steps.num_tables, num_bytes)
            samples.append(PathSample(*size, alone_s, seconds))
        path = fitted_path(samples, measured_at=datetime.now(UTC).isoformat(timespec="seconds"))
        (folder / RESULT_NAME).write_text(json.dumps(path.to_json()), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


class _ReplicaSteps:
    """Embedding layers of one process, as the trainer feeds and runs them, and its share of batches and rows."""

    def __init__(
        self, peers: TablePeers | None, num_processes: int, widths: Sequence[int], *, seed: int
    ) -> None:
        self.num_processes, self.num_tables = num_processes, len(widths)
        features = FeatureSpec(num_dense=0, slot_rows=(ROWS_PER_COLUMN,) * NUM_COLUMNS)
        self._embeddings = [SlotEmbedding(features, dimension=width) for width in widths]
        tables = {}
        for index, layer in enumerate(self._embeddings):
            optimizer = get_row_optimizer("rowwise-adagrad")()
            tables[str(index)] = layer.new_table(str(index), optimizer, seed=0, peers=peers)
            layer.attach_table(tables[str(index)])
        self._model = StageModel(
            layers=dict(zip(tables, self._embeddings, strict=True)),
            tables=tables,
            dense_optimizer=get_dense_optimizer("sgd")([]),
            input_width=0,
            output_width=0,
            device=CPU,
        )
        num_rows = BATCH_SIZE // num_processes
        self._slices = batch_slices(num_rows, num_microbatches=NUM_MICROBATCHES, shares=(1,), replica=0)
        self._num_batches = batches_at_once(num_rows)
        shape = (self._num_batches, num_rows, NUM_COLUMNS)
        drawn = torch.from_numpy(np.random.default_rng(seed).integers(0, ROWS_PER_COLUMN, shape))
        self._block = _of_ids(drawn.flatten(0, 1))
        self._batches = [_of_ids(ids) for ids in drawn]
        self.num_bytes = sum(exchanged_bytes(layer, self._batches) for layer in self._embeddings)
        self._announced: Sequence[Announced] = ()
        self._feed = iter(BatchFeed(self._prepare, count()))

    def seconds(self) -> float:
        """Return the processor time of a step, the mean over all batches that are requested together, or twice.

        One step before them warms up.
        """
        num_steps = self._num_batches * -(-LEAST_STEPS // self._num_batches)
        for step, (_, microbatches) in enumerate(islice(self._feed, num_steps + 1)):
            self._take_step(microbatches)
            if step == 0:
                started_s = processor_seconds()
        return (processor_seconds() - started_s) / num_steps

    def _prepare(self, step: int) -> list[MicroBatch]:
        number = step % self._num_batches
        if number == 0:
            self._announced = request_rows(self._block, self._model, num_batches=self._num_batches)
        return cut_batch(self._batches[number], self._slices, self._announced[number])

    def _take_step(self, microbatches: Sequence[MicroBatch]) -> None:
        leaving = []
        for microbatch in microbatches:
            for table, looked_up in microbatch.announced:
                table.expect(looked_up)
            leaving.append([layer(microbatch.batch) for layer in self._embeddings])
        for found in leaving:
            torch.autograd.backward(found, [torch.full_like(rows_BX, LEARNING_RATE) for rows_BX in found])
        self._model.update_rows(LEARNING_RATE)


def processor_seconds() -> float:
    """Return the processor time of this process, without the threads of gloo.

    gloo has a thread for each group, which wakes 100 times a second by the clock: it takes the more time the more
    processes share a core, and a worker has few groups.
    """
    of_gloo = 0.0
    for name in Path("/proc/self/task").glob("*/comm"):
        with suppress(FileNotFoundError):  # a thread that ended meanwhile
            if name.read_text(encoding="utf-8").startswith("gloo"):
                of_gloo += int(name.with_name("schedstat").read_text(encoding="utf-8").split()[0]) / 1e9
    return time.process_time() - of_gloo


def _of_ids(ids_BK: torch.Tensor) -> ClickBatch:
    """Return a batch without features and labels."""
    num_rows = len(ids_BK)
    return ClickBatch(dense=torch.empty(num_rows, 0), ids=ids_BK, labels=torch.empty(num_rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    start_processes(  # type: ignore[no-untyped-call]
        _measure_replica, (Path(sys.argv[1]),), max(NUM_PROCESSES), start_method="fork"
    )
