"""How fast a table trains that is ten and three times as large as the memory for it, which the kernel limits.

What is compared trains by the loop of a worker, each in a process of its own, in turns: a process is stopped, with
its sweeps, while another runs. Figures are medians of the rounds' ratios. The control group of a process allows the
memory for rows and what the process has without a table; the peak is the kernel's count, page cache included.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from heterps_core.embeddings.row_kernels import row_kernels
from heterps_core.embeddings.swept import cold_rows
from heterps_core.embeddings.swept.cold_rows import ColdRows
from heterps_core.embeddings.swept.sweep_memory import SWEEPING_THREADS
from heterps_core.training.checkpoint import TrainingCursor
from tests.benchmarks.tiered_training import (
    BATCH_SIZE,
    NUM_BATCHES,
    NUM_ROWS,
    ROW_BYTES,
    Case,
    Trainer,
    make_loop,
    write_ids,
)
from tests.benchmarks.training_engine import NUM_SLOTS
from tests.benchmarks.training_speed import figure
from tests.waiting import wait_for
from tests.worker_processes import run_in_processes

RATIOS = (10, 3)
EXPONENTS = (1.05, 0.8, 1.2)
NUM_ROUNDS = 5
ROUND_S = 6.0
MORE_BYTES = 64 * 2**20
"""Beyond what a process has without a table: kernel memory, and pages that the kernel has not dropped yet."""

EXACT_STEPS, EXACT_ROWS, EXACT_BATCH = 200, 520_000, 256
EXACT_MEMORY_BYTES = 32_000_000


def run(*, seed: int = 0, num_cases: int = NUM_ROWS) -> list[dict[str, Any]]:
    """Measure everything, print a table and return its figures in the form of the benchmark contract.

    Args:
        num_cases: Rows of the table; a tenth of them must have room for those of a batch.
    """
    num_rows = num_cases
    # Compiled before anything is timed.
    row_kernels()
    figures: list[dict[str, Any]] = []
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        root = Path(folder)
        figures += largest_difference(root, seed=seed)
        disk_bytes_per_s = sweep_speed(root, num_rows=num_rows)
        base_bytes = bytes_without_table(root, seed=seed)
        print(
            f"{num_rows:,} rows of {ROW_BYTES} bytes, batch {BATCH_SIZE}; the disk reads and writes in order at "
            f"{disk_bytes_per_s / 1e6:.0f} MB/s together; a process without a table has {base_bytes / 1e6:.0f} MB"
        )
        for exponent in EXPONENTS:
            ids = root / f"ids-{exponent}"
            write_ids(
                ids,
                exponent=exponent,
                num_rows=num_rows,
                num_batches=NUM_BATCHES,
                batch_size=BATCH_SIZE,
                seed=seed,
            )
            for ratio in RATIOS:
                name = f"{ratio}x_zipf{exponent}"
                memory_bytes = num_rows * ROW_BYTES // ratio
                cases = [Case(ids, kind, num_rows, memory_bytes) for kind in ("memory", "swept")]
                figures += compare(
                    name, cases, root, base_bytes=base_bytes, disk_bytes_per_s=disk_bytes_per_s
                )
            ids.unlink()
    for entry in figures:
        print(f"{entry['name']:<44}{entry['value']:>12.3g} {entry['unit']}")
    print(
        f"medians of {NUM_ROUNDS} rounds; load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after"
    )
    return figures


def compare(
    name: str, cases: list[Case], root: Path, *, base_bytes: int, disk_bytes_per_s: float
) -> list[dict[str, Any]]:
    """Let processes train in turns; the first is the one in memory, the second the swept one."""
    with ExitStack() as running:
        trainers = []
        for case in cases:
            folder = Path(running.enter_context(tempfile.TemporaryDirectory(dir=root)))
            limit = None if case.kind == "memory" else base_bytes + case.memory_bytes + MORE_BYTES
            trainer = Trainer(case, folder, running.enter_context(memory_group(limit)))
            running.callback(trainer.end)
            trainer.warm_up()
            trainers.append(trainer)
        swept = trainers[1]
        counts_before, step_before = swept.counts, swept.steps_of_sweeps
        cpu_before = [trainer.cpu_s for trainer in trainers[:2]]
        steps_before = [trainer.num_steps for trainer in trainers[:2]]
        rounds = [[trainer.run_for(ROUND_S) for trainer in trainers] for _ in range(NUM_ROUNDS)]
        cpu_per_step = [
            (trainer.cpu_s - cpu) / (trainer.num_steps - steps)
            for trainer, cpu, steps in zip(trainers, cpu_before, steps_before, strict=False)
        ]
        counts, num_steps = swept.counts, swept.steps_of_sweeps - step_before
        peak_bytes, limit_bytes = swept.peak_bytes, base_bytes + cases[1].memory_bytes + MORE_BYTES
    speeds = {
        trainer.case.kind: statistics.median(each) * BATCH_SIZE
        for trainer, each in zip(trainers, zip(*rounds, strict=True), strict=True)
    }
    ratio = statistics.median(speeds_of[1] / speeds_of[0] for speeds_of in rounds)
    moved = counts.bytes_read + counts.bytes_written - counts_before.bytes_read - counts_before.bytes_written
    bytes_per_sample = moved / (num_steps * BATCH_SIZE)
    asked, fetched = (
        getattr(counts, field) - getattr(counts_before, field) for field in ("rows_asked", "rows_fetched")
    )
    sweep_ns = 1e9 * (cpu_per_step[1] - cpu_per_step[0]) * num_steps / (fetched * ROW_BYTES)
    allowed = min(speeds["memory"], disk_bytes_per_s / bytes_per_sample)
    print(
        f"{name}: "
        + ", ".join(f"{kind} {speed / 1e3:.1f} k samples/s" for kind, speed in speeds.items())
        + f"; {1 - fetched / asked:.1%} of a batch's rows in memory, {fetched / num_steps:,.0f} fetched a step, "
        f"{bytes_per_sample:,.0f} disk bytes a sample, which the disk allows at "
        f"{disk_bytes_per_s / bytes_per_sample / 1e3:.1f} k samples/s; peak {peak_bytes / 1e6:.0f} of "
        f"{limit_bytes / 1e6:.0f} MB",
        flush=True,
    )
    return [
        figure(f"swept_over_memory_{name}", ratio, "ratio"),
        figure(f"swept_over_memory_cpu_{name}", cpu_per_step[0] / cpu_per_step[1], "ratio"),
        figure(f"sweep_ns_per_byte_{name}", sweep_ns, "ns/byte", higher_is_better=False),
        figure(f"swept_over_disk_limit_{name}", speeds["swept"] / allowed, "ratio"),
        figure(f"swept_peak_over_limit_{name}", peak_bytes / limit_bytes, "ratio", higher_is_better=False),
    ]


def largest_difference(root: Path, *, seed: int) -> list[dict[str, Any]]:
    """Compare rows and optimizer state after 200 steps with those in memory, with one and two replicas."""
    ids = write_ids(
        root / "ids-exact",
        exponent=1.05,
        num_rows=EXACT_ROWS,
        num_batches=EXACT_STEPS,
        batch_size=EXACT_BATCH,
        seed=seed,
    )
    largest = 0.0
    for num_replicas in (1, 2):
        for kind in ("memory", "swept"):
            case = Case(ids, kind, EXACT_ROWS, EXACT_MEMORY_BYTES // num_replicas)
            run_in_processes(_write_rows_behind_steps, num_replicas, case, str(root))
        for rank in range(num_replicas):
            in_memory, swept = (np.load(root / f"{kind}-{rank}.npy") for kind in ("memory", "swept"))
            largest = max(largest, float(np.abs(in_memory - swept).max()))
    return [figure("swept_largest_difference", largest, "", higher_is_better=False)]


class _EnoughError(Exception):
    """All steps that were wanted are done."""


def _write_rows_behind_steps(rank: int, case: Case, folder: str) -> None:
    """Write the shard of a replica after 200 steps, rows and optimizer state."""
    cold_rows.BLOCK_BYTES = 2**18

    def on_step(step: int) -> None:
        if step == EXACT_STEPS:
            raise _EnoughError

    loop = make_loop(
        case,
        Path(folder),
        batch_size=EXACT_BATCH,
        on_step=on_step,
        num_replicas=dist.get_world_size(),
        replica=rank,
    )
    with suppress(_EnoughError):
        loop.train(TrainingCursor())
    table = loop.model.tables["embedding"]
    assert bool(loop.model.swept_tables) == (case.kind == "swept")
    parts = [tensors for _, tensors in table.row_blocks()] if case.kind == "swept" else [table.tensors()]
    rows = [
        np.concatenate([part["weight"].numpy(), part["accumulator"].numpy()[:, None]], 1) for part in parts
    ]
    np.save(f"{folder}/{case.kind}-{rank}.npy", np.concatenate(rows))


def sweep_speed(root: Path, *, num_rows: int) -> float:
    """Return the bytes per second that the disk reads and writes, block after block as a sweep does, at best of 3."""
    rows = ColdRows([root], what="the benchmark", num_rows=num_rows, width=ROW_BYTES // 4)
    buffers = [rows.new_buffer() for _ in range(SWEEPING_THREADS)]
    for buffer in buffers:
        buffer.fill(1.0)
    for block in range(rows.num_blocks):
        rows.write(block, buffers[0])

    def sweep(own: int) -> None:
        for block in range(own, rows.num_blocks, SWEEPING_THREADS):
            rows.read(block, buffers[own])
            rows.write(block, buffers[own])

    seconds = []
    with ThreadPoolExecutor(SWEEPING_THREADS) as threads:
        for _ in range(3):
            started_s = time.perf_counter()
            list(threads.map(sweep, range(SWEEPING_THREADS)))
            seconds.append(time.perf_counter() - started_s)
    return 2 * rows.num_blocks * rows.block_bytes / min(seconds)


def bytes_without_table(root: Path, *, seed: int) -> int:
    """Return what a process that trains a table of a few rows has at most, by the kernel's count."""
    num_rows = 1_000 * NUM_SLOTS
    ids = write_ids(
        root / "ids-few", exponent=1.0, num_rows=num_rows, num_batches=4, batch_size=BATCH_SIZE, seed=seed
    )
    with memory_group(2**33) as group, tempfile.TemporaryDirectory(dir=root) as folder:
        trainer = Trainer(Case(ids, num_rows=num_rows), Path(folder), group)
        trainer.warm_up()
        found = trainer.peak_bytes
        trainer.end()
    return found


@contextmanager
def memory_group(limit_bytes: int | None) -> Iterator[Path | None]:
    """Yield a control group for memory with a limit; None without one."""
    if limit_bytes is None:
        yield None
        return
    group = Path(f"/sys/fs/cgroup/memory/heterps-tiers-{os.getpid()}-{time.monotonic_ns()}")
    group.mkdir()
    for file in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
        if (group / file).exists():
            (group / file).write_text(str(limit_bytes))
    try:
        yield group
    finally:
        wait_for(partial(_is_removed, group), what="the end of all processes of the group")


def _is_removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False
    return True
