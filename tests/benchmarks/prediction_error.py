"""How far the predicted throughput of a dry run is from the one that is measured, over random plans.

Each plan is a model, a cut into stages, replica counts and a batch size, drawn by the seed. It is profiled and
predicted as `make train-ctr` does, and then trained for some seconds by worker processes on this machine, one for
each replica and with one thread each: batches read from a prepared data set by the trainer's feed, its runner, its
updates. Start-up and the first steps do not count; what counts is the median step, as in a run's own record. Other
programs slow the workers down, and prediction knows nothing of them: the run is cut into windows, and those count in
which other programs took the smallest part of the cores. The processor time of all workers, which others hardly
change, is compared with the predicted one too.

What was measured can be kept in a folder (`--keep`), so that a run that is cut short goes on where it stopped; the
predictions are worked out again from the kept profiles each time.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import FeatureSpec
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.models.chain import build_chain
from heterps_core.planning.simulate.dry_run import DryRunPrediction
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.job import TrainingConfig, default_microbatches
from heterps_core.training.loop import TrainingLoop
from heterps_core.training.pipeline.stage_place import join_stage, world_group
from heterps_core.training.storage.run_directory import STOP, RunDirectory
from heterps_core.transport.rank_layout import RankLayout
from tests.worker_processes import run_in_processes

MODELS = ("lr", "wide-deep", "ctrdnn", "nce", "matchnet", "2emb")
"""From one layer to two branches, of 2 to 40 microseconds a row."""

REPLICAS = ((1,), (1, 1), (2,), (2, 1), (1, 2), (1, 1, 1), (2, 1, 2), (1, 1, 1, 1))
BATCH_SIZES = (256, 512, 1024, 2048, 4096)
NUM_CLICKS = 60_000
BUCKETS_PER_SLOT = 40_000
NUM_WARMUP_STEPS = 5
WINDOW_S = 0.1
COUNTED_S, MOST_S = 1.0, 8.0
"""Seconds of windows that count; a run ends once so many were undisturbed, at the latest after the second."""

MOST_OTHERS = 0.04
"""Part of the cores that other programs may take in a window that is undisturbed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomPlan:
    """One case."""

    model: str
    batch_size: int
    replicas: tuple[int, ...]
    last_layers: tuple[int, ...]
    """Of each stage."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Return the stages; their device type does not matter."""
        firsts = (0, *(last + 1 for last in self.last_layers[:-1]))
        return tuple(
            Stage(first, last, "cpu-c7i", count)
            for first, last, count in zip(firsts, self.last_layers, self.replicas, strict=True)
        )

    def config(self, seed: int) -> TrainingConfig:
        """Return the numbers of its run, with the trainer's own micro-batches."""
        return TrainingConfig(
            batch_size=self.batch_size,
            num_microbatches=default_microbatches(self.batch_size, num_stages=len(self.replicas)),
            num_epochs=1_000,
            seed=seed,
            checkpoint_interval_steps=1_000_000,
        )

    def __str__(self) -> str:
        cuts = " ".join(f"{s.first_layer}-{s.last_layer}x{s.num_replicas}" for s in self.stages)
        return f"{self.model:<10}{self.batch_size:>5}  {cuts}"


def run(*, seed: int = 0, num_cases: int = 20, keep: Path | None = None) -> list[dict[str, Any]]:
    """Measure, print a table and return its figures in the form of the benchmark contract."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        dataset = make_dataset(folder)
        plans = draw_plans(dataset.features, num_plans=num_cases, seed=seed)
        errors: dict[str, list[float]] = {"throughput": [], "processor_time": []}
        print(f"{'plan':<42}{'predicted':>10}{'measured':>10}{'error':>8}  samples/s; ms of processor a step")
        for plan in plans:
            predicted = predict(plan, dataset, folder / "profiles", seed)
            windows = measured_windows(plan, dataset, folder, seed)
            samples_per_s = plan.batch_size / predicted.step_seconds
            steps = [step for window in windows for step in window.step_seconds]
            measured = plan.batch_size / statistics.median(steps)
            work_s = predicted.work_seconds
            measured_work_s = sum(window.workers_s for window in windows) / len(steps)
            errors["throughput"].append(samples_per_s / measured - 1)
            errors["processor_time"].append(work_s / measured_work_s - 1)
            print(
                f"{plan!s:<42}{samples_per_s:>10,.0f}{measured:>10,.0f}{errors['throughput'][-1]:>+8.1%}"
                f"{1e3 * work_s:>10.2f}{1e3 * measured_work_s:>10.2f}{errors['processor_time'][-1]:>+8.1%}",
                flush=True,
            )
    figures = [
        figure(f"{name}_error_{word}", summary(map(abs, found)))
        for name, found in errors.items()
        for word, summary in (("median", statistics.median), ("worst", max))
    ]
    print(
        f"{num_cases} plans, seed {seed}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}; "
        + ", ".join(f"{entry['name']} {entry['value']:.1%}" for entry in figures)
    )
    return figures


def make_dataset(folder: Path) -> PreparedDataset:
    """Write and prepare synthetic clicks, or open those that are there."""
    clicks = folder / "clicks.tsv"
    if not clicks.exists():
        write_click_stream(clicks, num_rows=NUM_CLICKS, seed=0)
    return prepare_dataset(
        clicks, schema=CRITEO_SCHEMA, buckets_per_slot=BUCKETS_PER_SLOT, out_dir=folder / "prepared"
    )


def draw_plans(features: FeatureSpec, *, num_plans: int, seed: int) -> list[RandomPlan]:
    """Draw plans; models and replica counts take turns in random order, so that each occurs."""
    random = np.random.default_rng(seed)
    models = _in_turns(MODELS, num_plans, random)
    shapes = _in_turns(range(len(REPLICAS)), num_plans, random)
    plans = []
    for model, shape in zip(models, shapes, strict=True):
        num_layers = len(build_chain(model, features, seed=0))
        # A logistic regression has too few layers for the longest pipelines.
        replicas = REPLICAS[shape][:num_layers]
        cuts = np.sort(random.choice(num_layers - 1, len(replicas) - 1, replace=False))
        plans.append(
            RandomPlan(
                model=model,
                batch_size=int(random.choice(BATCH_SIZES)),
                replicas=replicas,
                last_layers=(*cuts.tolist(), num_layers - 1),
            )
        )
    return plans


def _in_turns(values: Any, count: int, random: np.random.Generator) -> list[Any]:
    turns = [value for _ in range(-(-count // len(values))) for value in random.permutation(values).tolist()]
    return turns[:count]


def predict(plan: RandomPlan, dataset: PreparedDataset, cache: Path, seed: int) -> DryRunPrediction:
    """Profile and predict as the flow does."""
    from heterps_core.profiling.measurement.layer_profiler import trace_model
    from heterps_core.profiling.profile_cache import local_profiles
    from tasks.profiling import ProfiledModel, _profile_request, dry_run_request
    from tasks.scheduling import predict_dry_run_here

    request = _profile_request(dataset, model=plan.model, batch_size=plan.batch_size)
    request = dry_run_request(request, plan.batch_size)
    graph = trace_model(request)
    (profile,) = local_profiles([request], graph, cache_directory=cache)
    profiled = ProfiledModel(
        graph=graph,
        local_profile=profile,
        planned_graph=graph,
        profiles={},
        planned_request=request,
    )
    return predict_dry_run_here(profiled, plan.stages, plan.config(seed))


def measured_windows(plan: RandomPlan, dataset: PreparedDataset, folder: Path, seed: int) -> list[Window]:
    """Train the plan, or return what is kept of an earlier run: the least disturbed windows."""
    record = folder / "measured" / f"{plan!s} seed {seed}.json".replace(" ", "_")
    if not record.exists():
        with tempfile.TemporaryDirectory() as run:
            by_rank = run_in_processes(
                train_replica, sum(plan.replicas), plan, str(dataset.directory), run, seed
            )
        counted = least_disturbed(by_rank[sum(plan.replicas[:-1])], seconds=COUNTED_S)
        record.parent.mkdir(exist_ok=True)
        record.write_text(json.dumps([window._asdict() for window in counted]))
    windows = [Window(**window) for window in json.loads(record.read_text())]
    print(f"{max(window.others for window in windows):.0%} ", end="")
    return windows


class Window(NamedTuple):
    """Some steps of a run."""

    others: float
    """Part of the cores that programs of others took meanwhile."""

    step_seconds: list[float]
    workers_s: float
    """For how long cores worked for the workers."""


def least_disturbed(windows: Sequence[Window], *, seconds: float) -> list[Window]:
    """Return the windows in which others took the least, for as many seconds as asked for or all."""
    counted: list[Window] = []
    for window in sorted(windows, key=lambda window: window.others):
        if sum(map(seconds_of, counted)) < seconds:
            counted.append(window)
    return counted


def train_replica(rank: int, plan: RandomPlan, dataset: str, run: str, seed: int) -> list[Window]:
    """Train as one worker does, until the first one of the last stage asks for a stop; returns what that one saw."""
    process_ids = [0] * dist.get_world_size()
    dist.all_gather_object(process_ids, os.getpid())
    clock = StepClock(RunDirectory(run), process_ids, is_reporting=rank == sum(plan.replicas[:-1]))
    loop = new_loop(rank, plan, PreparedDataset.open(dataset), clock, seed)
    loop.train(TrainingCursor())
    return clock.windows


class StepClock:
    """Notes on one worker how long steps take, and asks for a stop when enough was seen.

    Args:
        run: Where to ask.
        process_ids: Of all workers.
        is_reporting: This is the worker.
    """

    def __init__(self, run: RunDirectory, process_ids: Sequence[int], *, is_reporting: bool) -> None:
        self.run = run
        self.windows: list[Window] = []
        self._process_ids = process_ids
        self._is_reporting = is_reporting
        self._ends: list[float] = []
        """Of the steps of this window, and of the one before."""

        self._others_s = self._workers_s = 0.0

    def __call__(self, step: int) -> None:
        """Note the end of a step; steps count from 1."""
        if step < NUM_WARMUP_STEPS or not self._is_reporting:
            return
        self._ends.append(time.perf_counter())
        if len(self._ends) > 1 and self._ends[-1] - self._ends[0] < WINDOW_S:
            return
        workers_s = core_seconds_of(self._process_ids)
        others_s = busy_core_seconds() - workers_s
        if len(self._ends) > 1:
            cores_s = (self._ends[-1] - self._ends[0]) * (os.cpu_count() or 1)
            steps = [after - before for before, after in pairwise(self._ends)]
            others = max(others_s - self._others_s, 0.0) / cores_s
            self.windows.append(Window(others, steps, workers_s - self._workers_s))
        self._ends, self._others_s, self._workers_s = self._ends[-1:], others_s, workers_s
        is_enough = sum(seconds_of(w) for w in self.windows if w.others < MOST_OTHERS) >= COUNTED_S
        if is_enough or sum(map(seconds_of, self.windows)) > MOST_S:
            self._is_reporting = False
            self.run.write_json(STOP, {})


def seconds_of(window: Window) -> float:
    """Return how long a window is."""
    return sum(window.step_seconds)


def busy_core_seconds() -> float:
    """Return for how long the cores of this machine have worked for any program since its start."""
    user, nice, system, *_ = Path("/proc/stat").read_text().split()[1:]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def core_seconds_of(process_ids: Sequence[int]) -> float:
    """Return for how long cores have worked for these processes."""
    ticks = 0
    for process_id in process_ids:
        # The name, in parentheses, may hold blanks.
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def new_loop(
    rank: int, plan: RandomPlan, dataset: PreparedDataset, clock: StepClock, seed: int
) -> TrainingLoop:
    """Build what a worker trains with, in a process that has joined the others."""
    config = plan.config(seed)
    firsts = np.cumsum([0, *plan.replicas]).tolist()
    layout = RankLayout(tuple(tuple(range(*ends)) for ends in pairwise(firsts)))
    place = join_stage(layout, rank, new_group=world_group)
    return TrainingLoop.of(plan.model, dataset, config, plan.stages, place, run=clock.run, on_step=clock)


def figure(name: str, value: float) -> dict[str, Any]:
    """Return a figure in the form of the benchmark contract."""
    return {"name": name, "value": round(value, 4), "unit": "ratio", "higher_is_better": False}
