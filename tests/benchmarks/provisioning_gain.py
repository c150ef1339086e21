"""How much dearer the paper's ways to count replicas are than whole counts of least cost, on random partitions.

Every method provisions the same runs of layers; the exact whole counts (`balance_replicas`) are the yardstick.
Partitions that no counts make feasible are drawn again, so a method's share of feasible ones is its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.provisioning.replica_balance import LayerRun, balance_replicas
from heterps_core.planning.provisioning.whole_counts import least_replicas_at_floor, stages_within_caps
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.provisioning.continuous_newton import newton_replicas
from heterps_core.provisioning.fixed_ratio import static_ratio_replicas, static_server_ratio_replicas
from tests.benchmarks.planner import draw, figure, show

Provisioning = Callable[[SchedulingProblem, Sequence[LayerRun]], tuple[Stage, ...]]


def floor_replicas(problem: SchedulingProblem, runs: Sequence[LayerRun]) -> tuple[Stage, ...]:
    """Return the least counts that reach the floor, each stage for itself."""
    return stages_within_caps(problem, runs, least_replicas_at_floor(problem, runs).tolist(), method="floor")


METHODS: dict[str, Provisioning] = {
    "at_floor": floor_replicas,
    "newton": newton_replicas,
    "sta_ratio": static_ratio_replicas,
    "sta_ps_ratio": static_server_ratio_replicas,
}
PARTITIONS_PER_PROBLEM = 5
MOST_RUNS = 6
MOST_DRAWS = 200
"""Partitions tried for one problem; few fit where the floor is high."""


def run(*, seed: int = 0, num_cases: int = 100) -> list[dict[str, Any]]:
    """Compare the methods on partitions of random problems of 16 layers x 4 types."""
    random = np.random.default_rng(seed)
    excesses: dict[str, list[float]] = {name: [] for name in METHODS}
    num_partitions = 0
    for problem in draw(16, 4, num_cases, seed):
        for runs, least_usd in feasible_partitions(problem, random):
            num_partitions += 1
            for name, provision in METHODS.items():
                excess = excess_over(least_usd, problem, runs, provision)
                if excess is not None:
                    excesses[name].append(excess)
    figures = [figure("partitions", num_partitions, "count")]
    for name, values in excesses.items():
        figures.append(figure(f"{name}_share_feasible", len(values) / max(num_partitions, 1), "share"))
        if values:
            figures += [
                figure(f"{name}_share_dearer", np.mean(np.array(values) > 1e-9), "share", higher=False),
                figure(f"{name}_median_excess", statistics.median(values), "ratio", higher=False),
                figure(f"{name}_mean_excess", statistics.mean(values), "ratio", higher=False),
                figure(f"{name}_worst_excess", max(values), "ratio", higher=False),
            ]
    show(
        figures, f"{num_cases} random problems, excess is cost over that of whole counts, less 1; seed {seed}"
    )
    return figures


def feasible_partitions(
    problem: SchedulingProblem, random: np.random.Generator
) -> list[tuple[list[LayerRun], float]]:
    """Return random partitions that some counts make feasible, each with its least cost in USD."""
    found: list[tuple[list[LayerRun], float]] = []
    for _ in range(MOST_DRAWS):
        if len(found) == PARTITIONS_PER_PROBLEM:
            break
        runs = random_runs(problem, random)
        try:
            found.append((runs, evaluate(problem, balance_replicas(problem, runs)).cost_usd))
        except InfeasiblePlanError:
            continue
    return found


def random_runs(problem: SchedulingProblem, random: np.random.Generator) -> list[LayerRun]:
    """Return one to `MOST_RUNS` runs with borders and types drawn evenly; neighbours differ."""
    num_runs = int(random.integers(1, MOST_RUNS + 1))
    borders = np.sort(random.choice(np.arange(1, problem.num_layers), num_runs - 1, replace=False)).tolist()
    names = problem.device_type_names
    types = [names[random.integers(len(names))]]
    while len(types) < num_runs:
        others = [name for name in names if name != types[-1]]
        types.append(others[random.integers(len(others))])
    return [
        LayerRun(first, end - 1, device_type)
        for first, end, device_type in zip([0, *borders], [*borders, problem.num_layers], types, strict=True)
    ]


def excess_over(
    least_usd: float, problem: SchedulingProblem, runs: Sequence[LayerRun], provision: Provisioning
) -> float | None:
    """Return how much dearer a method provisions than the least cost, or None where it finds no counts."""
    try:
        stages = provision(problem, runs)
    except InfeasiblePlanError:
        return None
    return evaluate(problem, stages).cost_usd / least_usd - 1
