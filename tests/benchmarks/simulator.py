"""How far the simulated pipeline is from the planner's closed form, how fast it is, and what stragglers cost.

The closed form, a batch in the time of the slowest stage, leaves out that every step fills and drains the pipeline.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.simulate.pipeline_load import PipelineLoad, StageLoad, pipeline_load
from heterps_core.planning.simulate.pipeline_simulation import simulate
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem
from tests.heterps_core.planning.simulate.builders import balanced_plan, random_plan

NUM_LAYERS, NUM_TYPES = 12, 4
NUM_MICROBATCHES = 8
NUM_STEPS = 120
LARGE_BATCH = 2**20
"""So many rows that no replica has visibly more of them than another."""

STRAGGLER_FACTOR = 2.0
NUM_STRAGGLER_PLANS = 20


def run(*, seed: int = 0, num_cases: int = 100) -> list[dict[str, Any]]:
    """Measure, print a table and return its figures in the form of the benchmark contract."""
    plans = draw_plans(num_cases, seed)
    figures = [
        *agreement(plans),
        figure("simulator_seconds_10000_workers_1000_steps", large_run_seconds(), "s"),
        *straggler_costs(draw_plans(NUM_STRAGGLER_PLANS, seed)),
    ]
    print(f"{num_cases} random plans, batch {LARGE_BATCH} in {NUM_MICROBATCHES} micro-batches, seed {seed}")
    for entry in figures:
        print(f"{entry['name']:<58}{entry['value']:>12,.3f} {entry['unit']}")
    return figures


def draw_plans(num_plans: int, seed: int) -> list[tuple[SchedulingProblem, tuple[Stage, ...]]]:
    """Return random problems with a plan each: half of them cut anywhere, half with balanced stages."""
    plans = []
    for index in range(num_plans):
        problem = replace(
            make_problem(seed + index, num_layers=NUM_LAYERS, num_types=NUM_TYPES), batch_size=LARGE_BATCH
        )
        draw = random_plan if index % 2 else balanced_plan
        plans.append((problem, draw(problem, np.random.default_rng(seed + index))))
    return plans


def agreement(plans: Sequence[tuple[SchedulingProblem, tuple[Stage, ...]]]) -> list[dict[str, Any]]:
    """Compare the throughput with the closed form."""
    errors_percent = [
        100 * abs(simulated(problem, stages) / evaluate(problem, stages).throughput_samples_per_s - 1)
        for problem, stages in plans
    ]
    return [
        figure("simulator_flushed_worst_error_percent", max(errors_percent), "%"),
        figure("simulator_flushed_median_error_percent", statistics.median(errors_percent), "%"),
    ]


def simulated(problem: SchedulingProblem, stages: Sequence[Stage], **options: Any) -> float:
    """Return the simulated throughput."""
    load = pipeline_load(problem, stages, num_microbatches=NUM_MICROBATCHES)
    return simulate(load, num_steps=NUM_STEPS, **options).throughput_samples_per_s


def large_run_seconds() -> float:
    """Return the wall time of a run of 10,000 workers, each with its own speed, for 1,000 steps."""
    counts = (6_000, 3_000, 1_000)
    load = PipelineLoad(
        batch_size=LARGE_BATCH,
        num_microbatches=NUM_MICROBATCHES,
        stages=tuple(
            StageLoad(
                num_replicas=count,
                forward_seconds=0.001,
                backward_seconds=0.001,
                weight_gradient_seconds=0.001,
                compute_row_share=0.9,
                input_seconds=0.0003 if stage else 0.0,
                output_seconds=0.0003 if stage < len(counts) - 1 else 0.0,
                exchange_seconds=0.0 if stage else 0.0005,
                all_reduce_seconds=0.001 if stage else 0.0,
            )
            for stage, count in enumerate(counts)
        ),
    )
    speeds = np.random.default_rng(0).uniform(1.0, 1.2, size=(len(counts), max(counts)))
    workers = [(stage, replica) for stage, count in enumerate(counts) for replica in range(count)]
    slow_factors = {worker: float(speeds[worker]) for worker in workers}
    started_s = time.perf_counter()
    simulate(load, num_steps=1_000, slow_factors=slow_factors)
    return time.perf_counter() - started_s


def straggler_costs(plans: Sequence[tuple[SchedulingProblem, tuple[Stage, ...]]]) -> list[dict[str, Any]]:
    """Slow one replica of each stage down and see how much throughput is lost, in steps that flush."""
    losses_percent: dict[str, list[float]] = {"first": [], "inner": [], "last": []}
    for problem, stages in plans:
        undisturbed = simulated(problem, stages)
        for stage in range(len(stages)):
            place = "first" if stage == 0 else "last" if stage == len(stages) - 1 else "inner"
            disturbed = simulated(problem, stages, slow_factors={(stage, 0): STRAGGLER_FACTOR})
            losses_percent[place].append(100 * (1 - disturbed / undisturbed))
    return [
        figure(f"straggler_2x_{place}_stage_{name}_loss_percent", summary(losses), "%")
        for place, losses in losses_percent.items()
        if losses
        for name, summary in (("median", statistics.median), ("worst", max))
    ]


def figure(name: str, value: float, unit: str) -> dict[str, Any]:
    """Return one figure in the form of the benchmark contract."""
    return {"name": name, "value": float(np.round(value, 4)), "unit": unit, "higher_is_better": False}
