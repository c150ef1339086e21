"""The processes of `tiered_table`: CTR-DNN on clicks whose ids are Zipf distributed, by the loop of a worker."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.swept.sweep_memory import SweepCounts
from heterps_core.models.architectures.ctr_dnn import EMBEDDING_DIMENSION
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.job import TrainingConfig
from heterps_core.training.loop import TrainingLoop
from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.transport.rank_layout import RankLayout
from tests.benchmarks.training_engine import LAST_LAYER, NUM_DENSE, NUM_SLOTS, make_features

NUM_ROWS = 20_000_000
BATCH_SIZE = 4096
ROW_BYTES = 4 * (EMBEDDING_DIMENSION + 1)
"""With row-wise Adagrad's accumulator."""

NUM_BATCHES = 800
NUM_THREADS = 2
ENDLESS = 10**9


@dataclass(frozen=True)
class Case:
    """What one process trains."""

    ids: Path
    kind: str = "memory"
    """Where rows are: "memory", or "swept" for those on disk."""

    num_rows: int = NUM_ROWS
    memory_bytes: int = 0


class ZipfClicks:
    """Clicks as a data set gives them, whose ids stand in a file."""

    num_eval_rows = 0

    def __init__(self, ids: Path, batch_size: int, features: FeatureSpec) -> None:
        self._ids, self._batch_size, self.features = ids, batch_size, features
        generator = torch.Generator().manual_seed(0)
        self._dense = torch.randn(batch_size, NUM_DENSE, generator=generator)
        self._labels = torch.randint(0, 2, (batch_size,), generator=generator).float()

    def num_batches(self, batch_size: int) -> int:
        return ENDLESS

    def batch_rows(self, epoch: int, index: int, *, positions: Any, **_: Any) -> Any:
        return index * self._batch_size + positions

    def batch(self, rows: Any) -> ClickBatch:
        batch, first = divmod(int(rows[0]), self._batch_size)
        with self._ids.open("rb") as file:
            num_ids = self._batch_size * NUM_SLOTS
            num_batches = os.fstat(file.fileno()).st_size // (4 * num_ids)
            file.seek(4 * (batch % num_batches * num_ids + first * NUM_SLOTS))
            ids = np.fromfile(file, np.int32, len(rows) * NUM_SLOTS).reshape(-1, NUM_SLOTS)
        part = slice(first, first + len(rows))
        return ClickBatch(
            dense=self._dense[part], ids=torch.from_numpy(ids).long(), labels=self._labels[part]
        )


def write_ids(
    path: Path, *, exponent: float, num_rows: int, num_batches: int, batch_size: int, seed: int
) -> Path:
    """Write ids; the k-th most frequent of a slot has a probability of k^-exponent, and frequent ones lie apart."""
    rows_of_slot = num_rows // NUM_SLOTS
    share = np.cumsum(np.arange(1, rows_of_slot + 1, dtype=np.float64) ** -exponent)
    generator = np.random.default_rng(seed)
    ids_by_rank = generator.permutation(rows_of_slot).astype(np.int32)
    with path.open("wb") as file:
        for _ in range(num_batches):
            drawn = np.sort(generator.random(batch_size * NUM_SLOTS) * share[-1])
            ids = ids_by_rank[np.searchsorted(share, drawn)]
            generator.shuffle(ids)
            ids.tofile(file)
    return path


def make_loop(
    case: Case, folder: Path, *, batch_size: int, on_step: Any, num_replicas: int = 1, replica: int = 0
) -> TrainingLoop:
    """Return the loop of a worker that trains a case."""
    group = None
    if num_replicas > 1:
        group = dist.new_group()
    config = TrainingConfig(
        batch_size=batch_size,
        num_microbatches=1,
        num_epochs=1,
        seed=0,
        checkpoint_interval_steps=ENDLESS,
        embedding_memory_bytes=case.memory_bytes if case.kind == "swept" else None,
    )
    stages = [Stage(0, LAST_LAYER, "cpu", num_replicas)]
    place = StagePlace(layout=RankLayout((tuple(range(num_replicas)),)), replica=replica, group=group)
    dataset = ZipfClicks(case.ids, batch_size, make_features(case.num_rows))
    run = RunDirectory(str(folder))
    return TrainingLoop.of("ctrdnn", dataset, config, stages, place, run=run, scratch=folder, on_step=on_step)


class EndedError(Exception):
    """A process ended by itself, or the kernel ended it."""


class Trainer:
    """A process that trains a case under a limit, and stands still but in `run_for`."""

    def __init__(self, case: Case, folder: Path, group: Path | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.case, self._group = case, group
        # Without locks, one of which a process that stands still might hold.
        self._steps = context.Value("q", 0, lock=False)
        self._counts = context.Array("q", 6, lock=False)
        self._process = context.Process(
            target=_train, args=(case, folder, group, self._steps, self._counts), daemon=True
        )
        self._process.start()

    def warm_up(self, timeout_s: float = 900.0) -> None:
        """Wait until sixteen windows have begun, or ten steps are done where there are none; then stop."""
        started_s = time.monotonic()
        while self._counts[5] < 16 if self.case.kind == "swept" else self._steps.value < 10:
            if not self._process.is_alive():
                raise EndedError(f"the process of {self.case} ended with {self._process.exitcode}")
            if time.monotonic() - started_s > timeout_s:
                raise RuntimeError(
                    f"the process of {self.case} did not come to its {self._steps.value + 1}th step"
                )
            time.sleep(0.2)
        os.kill(self._process.pid, signal.SIGSTOP)

    def run_for(self, seconds: float) -> float:
        """Let it train; returns its steps per second."""
        num_steps, started_s = self._steps.value, time.perf_counter()
        os.kill(self._process.pid, signal.SIGCONT)
        time.sleep(seconds)
        os.kill(self._process.pid, signal.SIGSTOP)
        elapsed_s = time.perf_counter() - started_s
        if not self._process.is_alive():
            raise EndedError(f"the process of {self.case} ended with {self._process.exitcode}")
        return (self._steps.value - num_steps) / elapsed_s

    @property
    def num_steps(self) -> int:
        """Steps that are done."""
        return self._steps.value

    @property
    def cpu_s(self) -> float:
        """Processor time of all its threads."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def steps_of_sweeps(self) -> int:
        """Steps done when the last sweep had ended."""
        return self._counts[4]

    @property
    def counts(self) -> SweepCounts:
        names = ("rows_asked", "rows_fetched", "bytes_read", "bytes_written")
        return SweepCounts(**dict(zip(names, self._counts[:4], strict=True)))

    @property
    def peak_bytes(self) -> int:
        """By the kernel's count of the control group."""
        assert self._group is not None
        return int((self._group / "memory.max_usage_in_bytes").read_text())

    def end(self) -> None:
        if self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()


def _train(case: Case, folder: Path, group: Path | None, steps: Any, counts: Any) -> None:
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    torch.set_num_threads(NUM_THREADS)

    def on_step(step: int) -> None:
        steps.value = step
        for table in loop.model.swept_tables.values():
            found = table.counts
            if found.rows_asked != counts[0]:
                counts[:] = [
                    found.rows_asked,
                    found.rows_fetched,
                    found.bytes_read,
                    found.bytes_written,
                    step,
                    counts[5] + 1,
                ]

    loop = make_loop(case, folder, batch_size=BATCH_SIZE, on_step=on_step)
    loop.train(TrainingCursor())
