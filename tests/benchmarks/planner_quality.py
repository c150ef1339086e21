"""How good the searches for a plan are and how long they take, on random problems, on one core.

How often a learning search ends within 0.1 % of the proven optimum; how fast the exact one is, also after a price
change, and how fast one plan is rated within a batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.plan_rater import PlanRater
from heterps_core.planning.search.schedulers import get_scheduler
from heterps_core.planning.search.search_result import SearchResult
from tests.benchmarks.planner import draw, figure, show, timed, with_scaled_prices

NEAR = 1e-3

SIZES = ((16, 4), (32, 4))

LARGE = (100, 10)
"""Layers and device types of problems that only the exact search gets, a few of them."""

STRONG, WEAK = ("reinforce",), ("reinforce-paper", "reinforce-rnn", "bayesian")

NUM_COMPARED = 5
"""Problems on which the weaker searches run too; a run of theirs takes several seconds."""


def run(*, seed: int = 0, num_cases: int = 100) -> list[dict[str, Any]]:
    """Compare searches with the proven optimum, and time the exact one."""
    figures = speed(seed, num_cases=max(1, num_cases // 10))
    for name in STRONG:
        for num_layers, num_types in SIZES:
            problems = draw(num_layers, num_types, num_cases, seed)
            figures += quality(name, problems, f"{num_layers}x{num_types}")
    small = draw(16, 4, min(num_cases, NUM_COMPARED), seed)
    for name in WEAK:
        figures += quality(name, small, "16x4")
    show(figures, f"{num_cases} random problems of each size ({len(small)} for the weak ones), seed {seed}")
    return figures


def quality(scheduler: str, problems: Sequence[SchedulingProblem], size: str) -> list[dict[str, Any]]:
    """Return share near the optimum, mean gap, evaluations and seconds of one search at its default budget."""
    search = get_scheduler(scheduler)
    results = [
        search.search(problem, budget_evaluations=search.default_budget_evaluations, seed=index)
        for index, problem in enumerate(problems)
    ]
    prefix = scheduler.replace("-", "_")
    evaluations = statistics.median(result.plan.num_evaluations for result in results)
    figures = [
        *near_and_seconds(results, prefix, size),
        figure(f"{prefix}_mean_gap_{size}", mean_gap(results), "ratio", higher=False),
        figure(f"{prefix}_median_evaluations_{size}", evaluations, "plans", higher=False),
    ]
    if share_near(results) > 0.5:  # else the median run never comes near
        median_near = statistics.median(seconds_until_near(result) for result in results)
        figures.append(figure(f"{prefix}_median_seconds_until_near_{size}", median_near, "s", higher=False))
    return figures


def near_and_seconds(results: Sequence[SearchResult], prefix: str, size: str) -> list[dict[str, Any]]:
    """Return the share near the optimum, and median and worst seconds."""
    seconds = [result.search_seconds for result in results]
    return [
        figure(f"{prefix}_share_within_0.1_percent_{size}", share_near(results), "share"),
        figure(f"{prefix}_median_seconds_{size}", statistics.median(seconds), "s", higher=False),
        figure(f"{prefix}_worst_seconds_{size}", max(seconds), "s", higher=False),
    ]


def share_near(results: Sequence[SearchResult]) -> float:
    """Return the share of results within 0.1 % of the proven bound."""
    return float(np.mean([result.plan.optimality_gap <= NEAR for result in results]))


def mean_gap(results: Sequence[SearchResult]) -> float:
    """Return the mean of cost over bound, less 1."""
    return statistics.mean(result.plan.optimality_gap for result in results)


def seconds_until_near(result: SearchResult) -> float:
    """Return when a search came within 0.1 % of the bound, or infinity."""
    near_usd = result.plan.cost_lower_bound_usd * (1 + NEAR)
    return min((point.seconds for point in result.history if point.best_cost_usd <= near_usd), default=np.inf)


def speed(seed: int, *, num_cases: int) -> list[dict[str, Any]]:
    """Time the exact search and the rating of plans; worst and median over random problems."""
    figures = []
    for num_layers, num_types in (*SIZES, LARGE):
        cases = max(1, num_cases // 3) if (num_layers, num_types) == LARGE else num_cases
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
    return figures


def evaluation_microseconds(seed: int, *, num_batches: int = 100, plans_per_batch: int = 256) -> float:
    """Return the amortised time of rating one plan of 16 layers x 4 types in a batch."""
    [problem] = draw(16, 4, 1, seed)
    rater = PlanRater(problem, budget_evaluations=10**9)
    random = np.random.default_rng(seed)
    batches = [random.integers(4, size=(plans_per_batch, 16)) for _ in range(num_batches)]
    seconds = timed(lambda: [rater.rate(batch) for batch in batches])
    return seconds / (num_batches * plans_per_batch) * 1e6
