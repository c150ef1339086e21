"""How near a training step comes to what the machine can do at most, in one process and two.

The limit is the time of the step's matrix products alone (forward, gradients of inputs and of weights; the same
shapes, type and threads) plus the bytes that look-ups and row updates must move over the measured copy bandwidth.
Products are `torch.mm`; a second figure takes the fastest product known for each shape instead. What is compared runs
in turns in the same run, and a figure is the median of the rounds' ratios. The load is printed beside them: under
other work absolute times mean little, and a step, with more waits of one thread for another, loses more than bare
products. So where the system left five rounds of each side uninterrupted, the ratio of their medians is a second
figure, named "undisturbed".
"""

from __future__ import annotations

import itertools
import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heterps_core.training.pipeline.stage_layers import DTYPES
from tests.benchmarks.plain_torch import plain_step, processor_seconds
from tests.benchmarks.training_engine import (
    BATCH_SIZE,
    DIMENSION,
    NUM_DENSE,
    NUM_SLOTS,
    WIDTHS,
    make_batches,
    make_features,
    make_loop_step,
    make_step,
    measured_memory,
    two_workers,
)

NUM_THREADS = 2
NUM_ROUNDS = 40
LEAST_UNDISTURBED = 5
SIZES = {"1M": 1_000_000, "10M": 10_000_000}
PLAIN_BATCH_SIZES = (32, 256, 1_024, 4_096, 16_384, 65_536)
PLAIN_TABLE_ROWS, PLAIN_BLOCK_ROWS, PLAIN_ROUNDS = 104_000, 4_096, 15
COPIED_FLOATS = 2**25
"""128 MiB: several times the caches."""


def run(*, seed: int = 0) -> list[dict[str, Any]]:
    """Measure everything, print a table and return its figures in the form of the benchmark contract."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    load_before = os.getloadavg()[0]
    print(
        f"CTR-DNN 400x3, {NUM_SLOTS} slots x {DIMENSION}, batch {BATCH_SIZE}, {NUM_THREADS} threads, seed {seed}"
    )
    try:
        figures = [entry for size, rows in SIZES.items() for entry in fractions_of_limit(size, rows, seed)]
        figures += [entry for size, rows in SIZES.items() for entry in over_one_process(size, rows, seed)]
    finally:
        torch.set_num_threads(num_threads)
    figures += memory(seed)
    figures += over_plain_torch(seed)
    for entry in figures:
        print(f"{entry['name']:<40}{entry['value']:>10.3f} {entry['unit']}")
    print(
        f"medians of {NUM_ROUNDS} rounds; load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after"
    )
    return figures


def fractions_of_limit(size: str, num_rows: int, seed: int) -> list[dict[str, Any]]:
    """Compare the engine with both limits, in both precisions."""
    figures = []
    for precision, dtype in DTYPES.items():
        work = {
            "step": make_step(num_rows, precision=precision, seed=seed),
            "products": products(dtype, is_fastest=False),
            "fastest": products(dtype, is_fastest=True),
            "copy": copy_block(),
        }
        rounds = in_turns(work)
        moved = embedding_bytes(dtype)
        copied = 2 * 4 * COPIED_FLOATS
        rows_s = moved / copied * statistics.median(rounds["copy"].seconds)
        step_s = statistics.median(rounds["step"].seconds)
        print(
            f"{size} {precision}: step {1e3 * step_s:.1f} ms ({BATCH_SIZE / step_s / 1e3:.1f} k samples/s), "
            f"products {1e3 * statistics.median(rounds['products'].seconds):.1f} ms, fastest ones "
            f"{1e3 * statistics.median(rounds['fastest'].seconds):.1f} ms, embedding bytes {1e3 * rows_s:.1f} ms"
        )
        for kind, name in (("products", "limit"), ("fastest", "fastest_limit")):
            limit = Rounds([dense_s + rows_s for dense_s in rounds[kind].seconds], rounds[kind].switches)
            figures += ratios(f"{precision}_fraction_of_{name}_{size}", limit, rounds["step"])
    return figures


def over_one_process(size: str, num_rows: int, seed: int) -> list[dict[str, Any]]:
    """Compare two workers of one thread, which share the table, with one process of two threads.

    As workers of one machine they share memory; "by_messages" is what workers of several do, over loopback.
    """
    with (
        two_workers(num_rows, seed, shares_memory=True) as both,
        two_workers(num_rows, seed, shares_memory=False) as both_by_messages,
    ):
        one = make_step(num_rows, precision="float32", seed=seed)
        rounds = in_turns({"one": one, "two": both, "by_messages": both_by_messages})
    suffix = "" if size == "1M" else f"_{size}"
    return [
        # The workers' interruptions are not counted here.
        *ratios(f"two_workers_over_one_process{suffix}", rounds["one"], rounds["two"])[:1],
        *ratios(f"two_workers_by_messages_over_one_process{suffix}", rounds["one"], rounds["by_messages"])[
            :1
        ],
    ]


def memory(seed: int) -> list[dict[str, Any]]:
    """Compare the peak of a process of 10 M rows with 1.3 times its parameters and state plus 0.5 GiB."""
    peak_bytes, state_bytes = measured_memory(SIZES["10M"], seed=seed)
    allowed = 1.3 * state_bytes + 2**29
    print(
        f"10M: peak memory {peak_bytes / 2**20:.0f} MiB, parameters and state {state_bytes / 2**20:.0f} MiB"
    )
    return [figure("peak_memory_over_allowance_10M", peak_bytes / allowed, "ratio", higher_is_better=False)]


def over_plain_torch(seed: int) -> list[dict[str, Any]]:
    """Compare the loop's step with one in plain torch, block by block in turns; above 1 the loop's is faster."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    features, figures = make_features(PLAIN_TABLE_ROWS), []
    for batch_size in PLAIN_BATCH_SIZES:
        batches = make_batches(PLAIN_TABLE_ROWS, seed=seed, batch_size=batch_size, num_batches=4)
        block = list(itertools.islice(itertools.cycle(batches), max(4, PLAIN_BLOCK_ROWS // batch_size)))
        rivals = (plain_step("ctrdnn", features, seed=seed, rate=0.05), make_loop_step(features, batch_size))
        rounds = [[processor_seconds(step, block) for step in rivals] for _ in range(PLAIN_ROUNDS + 1)][1:]
        ratio = statistics.median(plain / own for plain, own in rounds)
        figures.append(figure(f"over_plain_torch_{batch_size}", ratio, "ratio"))
    torch.set_num_threads(num_threads)
    return figures


class Rounds(NamedTuple):
    """What one side did in all rounds."""

    seconds: list[float]
    switches: list[int]
    """How often the system took a core away from this process."""

    @property
    def undisturbed_seconds(self) -> list[float]:
        """Of the rounds without an interruption."""
        return [seconds for seconds, switches in zip(*self, strict=True) if not switches]


def in_turns(work: dict[str, Callable[[], object]]) -> dict[str, Rounds]:
    """Call all in turn, round after round, after two rounds to warm up."""
    rounds = {name: Rounds([], []) for name in work}
    for index in range(NUM_ROUNDS + 2):
        for name, call in work.items():
            switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            started = time.perf_counter()
            call()
            if index >= 2:
                rounds[name].seconds.append(time.perf_counter() - started)
                rounds[name].switches.append(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches)
    return rounds


def ratios(name: str, over: Rounds, under: Rounds) -> list[dict[str, Any]]:
    """Return the median ratio over rounds and, where there are enough, that of undisturbed ones."""
    median = statistics.median(a / b for a, b in zip(over.seconds, under.seconds, strict=True))
    figures = [figure(name, median, "ratio")]
    quiet = (over.undisturbed_seconds, under.undisturbed_seconds)
    if min(map(len, quiet)) >= LEAST_UNDISTURBED:
        value = statistics.median(quiet[0]) / statistics.median(quiet[1])
        figures.append(figure(f"{name}_undisturbed", value, "ratio"))
    return figures


def products(dtype: torch.dtype, *, is_fastest: bool) -> Callable[[], None]:
    """Return the matrix products of a step, and nothing else."""
    widths = (NUM_SLOTS * DIMENSION + NUM_DENSE, *WIDTHS, 1)
    layers = [
        (
            torch.randn(BATCH_SIZE, wide).to(dtype),
            torch.randn(narrow, wide).to(dtype),
            torch.randn(BATCH_SIZE, narrow).to(dtype),
        )
        for wide, narrow in itertools.pairwise(widths)
    ]

    def multiply() -> None:
        for entering, weight, gradient in layers:
            torch.mm(entering, weight.t())
            torch.mm(gradient, weight)
            torch.mm(gradient.t(), entering)

    def multiply_fastest() -> None:
        for entering, weight, gradient in layers:
            onednn(entering, weight)
            onednn(gradient, weight.t())
            if dtype is torch.float32:
                onednn(gradient.t().contiguous(), entering.t())
            else:
                torch.mm(gradient.t(), entering)

    return multiply_fastest if is_fastest else multiply


def onednn(entering: Tensor, weight: Tensor) -> Tensor:
    """Return entering x weight^T by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(entering, weight, None, "none", [], "")


def copy_block() -> Callable[[], Tensor]:
    """Return a copy between two blocks that fit no cache."""
    source, target = torch.ones(COPIED_FLOATS), torch.zeros(COPIED_FLOATS)
    return lambda: target.copy_(source)


def embedding_bytes(dtype: torch.dtype) -> float:
    """Return the bytes that a batch's rows must move: rows read, vectors written; gradients, rows and their
    accumulators read, rows and accumulators written. Distinct rows are taken to be all."""
    num_values = BATCH_SIZE * NUM_SLOTS * DIMENSION
    bytes_of_rows = 3 * 4 * num_values + 2 * 4 * BATCH_SIZE * NUM_SLOTS
    return float(bytes_of_rows + 2 * dtype.itemsize * num_values)


def figure(name: str, value: float, unit: str, *, higher_is_better: bool = True) -> dict[str, Any]:
    """Return one figure in the form of the benchmark contract."""
    return {"name": name, "value": round(value, 3), "unit": unit, "higher_is_better": higher_is_better}
