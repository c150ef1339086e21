"""How fast and how good the searches for a plan are, on random problems, on one core.

Speed: the exact optimum, the same after a price change, and one plan rated within a batch. Quality: how often a
search ends within 0.1 % of the proven optimum, and how long it takes to get there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from heterps_core.scheduling.optimum import find_optimum
from heterps_core.scheduling.plan_rater import PlanRater
from heterps_core.scheduling.problem import SchedulingProblem
from heterps_core.scheduling.schedulers import get_scheduler
from tests.builders import make_problem

MAX_UNITS = 400
NEAR = 1e-3

REINFORCE_BUDGETS = {(16, 4): 130_000, (32, 4): 220_000}
NUM_COMPARED = 5
"""Problems on which the weaker searches run too; a run of theirs takes several seconds."""


def run_speed(*, seed: int = 0, num_cases: int = 10) -> list[dict[str, Any]]:
    """Time the exact search and the rating of plans; worst and median over random problems."""
    figures = []
    for num_layers, num_types, cases in (
        (16, 4, num_cases),
        (32, 4, num_cases),
        (100, 10, max(1, num_cases // 3)),
    ):
        problems = draw(num_layers, num_types, cases, seed)
        seconds = [timed(lambda problem=problem: find_optimum(problem)) for problem in problems]
        size = f"{num_layers}x{num_types}"
        figures.append(figure(f"exact_seconds_{size}", max(seconds), "s (worst)", higher=False))
        figures.append(figure(f"exact_median_seconds_{size}", statistics.median(seconds), "s", higher=False))
    replans = []
    for problem in draw(32, 4, num_cases, seed):
        find_optimum(problem)
        changed = with_scaled_prices(problem, np.random.default_rng(seed))
        replans.append(timed(lambda changed=changed: find_optimum(changed)))
    figures.append(figure("replan_seconds_32x4", max(replans), "s (worst)", higher=False))
    figures.append(figure("evaluation_microseconds", evaluation_microseconds(seed), "us", higher=False))
    show(figures, f"{num_cases} random problems of each size, seed {seed}")
    return figures


def run_quality(*, seed: int = 0, num_cases: int = 20) -> list[dict[str, Any]]:
    """Compare searches with the proven optimum."""
    figures = []
    for (num_layers, num_types), budget in REINFORCE_BUDGETS.items():
        problems = draw(num_layers, num_types, num_cases, seed)
        figures += quality("reinforce", problems, f"{num_layers}x{num_types}", budget)
    small = draw(16, 4, min(num_cases, NUM_COMPARED), seed)
    for name in ("reinforce-paper", "bayesian"):
        figures += quality(name, small, "16x4", get_scheduler(name).default_budget_evaluations)
    show(figures, f"{num_cases} random problems of each size ({len(small)} for the last two), seed {seed}")
    return figures


def quality(
    scheduler: str, problems: list[SchedulingProblem], size: str, budget_evaluations: int
) -> list[dict[str, Any]]:
    """Return share near the optimum, mean gap and seconds of one search."""
    results = [
        get_scheduler(scheduler).search(problem, budget_evaluations=budget_evaluations, seed=index)
        for index, problem in enumerate(problems)
    ]
    gaps = [result.plan.optimality_gap for result in results]
    seconds = [result.search_seconds for result in results]
    first_near = [
        min(
            (
                point.seconds
                for point in result.history
                if point.best_cost_usd <= result.plan.cost_lower_bound_usd * (1 + NEAR)
            ),
            default=float("inf"),
        )
        for result in results
    ]
    prefix = scheduler.replace("-", "_")
    share = float(np.mean(np.array(gaps) <= NEAR))
    figures = [
        figure(f"{prefix}_share_within_0.1_percent_{size}", share, "share"),
        figure(f"{prefix}_mean_gap_{size}", statistics.mean(gaps), "ratio", higher=False),
        figure(f"{prefix}_median_seconds_{size}", statistics.median(seconds), "s", higher=False),
        figure(f"{prefix}_worst_seconds_{size}", max(seconds), "s", higher=False),
        figure(f"{prefix}_evaluations_{size}", budget_evaluations, "plans", higher=False),
    ]
    if share > 0.5:  # else the median run never comes near
        median_near = statistics.median(first_near)
        figures.append(figure(f"{prefix}_median_seconds_until_near_{size}", median_near, "s", higher=False))
    return figures


def draw(num_layers: int, num_types: int, num_cases: int, seed: int) -> list[SchedulingProblem]:
    """Return random problems with loose caps."""
    return [
        make_problem(
            1_000 * (seed + 1) + index, num_layers=num_layers, num_types=num_types, max_units=MAX_UNITS
        )
        for index in range(num_cases)
    ]


def with_scaled_prices(problem: SchedulingProblem, random: np.random.Generator) -> SchedulingProblem:
    """Return the problem with every price up to 30 % up or down, as spot prices move in a night."""
    return replace(
        problem,
        device_types={
            name: replace(unit, price_usd_per_hour=unit.price_usd_per_hour * random.uniform(0.7, 1.3))
            for name, unit in problem.device_types.items()
        },
    )


def evaluation_microseconds(seed: int, *, num_batches: int = 100, plans_per_batch: int = 256) -> float:
    """Return the amortised time of rating one plan of 16 layers x 4 types in a batch."""
    [problem] = draw(16, 4, 1, seed)
    rater = PlanRater(problem, budget_evaluations=10**9)
    random = np.random.default_rng(seed)
    batches = [random.integers(4, size=(plans_per_batch, 16)) for _ in range(num_batches)]
    seconds = timed(lambda: [rater.rate(batch) for batch in batches])
    return seconds / (num_batches * plans_per_batch) * 1e6


def timed(work: Callable[[], object]) -> float:
    """Return the wall time of one call in seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def figure(name: str, value: float, unit: str, *, higher: bool = True) -> dict[str, Any]:
    """Return one figure in the form of the benchmark contract."""
    return {"name": name, "value": float(value), "unit": unit, "higher_is_better": higher}


def show(figures: list[dict[str, Any]], title: str) -> None:
    """Print figures as a table."""
    print(title)
    for entry in figures:
        print(f"{entry['name']:<56}{entry['value']:>14,.4f} {entry['unit']}")
