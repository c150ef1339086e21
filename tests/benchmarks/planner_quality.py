"""How good the learning searches for a plan are, on random problems, on one core.

How often a search ends within 0.1 % of the proven optimum, and how long it takes: from scratch, and warm-started
after a change of prices, beside the exact search on the same problems.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.schedulers import get_scheduler
from heterps_core.planning.search.schedulers.reinforce import ReinforceScheduler
from heterps_core.planning.search.search_result import SearchResult
from tests.benchmarks.planner import draw, figure, show, timed, with_scaled_prices

NEAR = 1e-3

SIZES = ((16, 4), (32, 4))

NUM_COMPARED = 5
"""Problems on which the weaker searches run too; a run of theirs takes several seconds."""

WARM_BUDGET_EVALUATIONS = 30_000
"""About a second on one core at 32 layers x 4 types."""


def run(*, seed: int = 0, num_cases: int = 100) -> list[dict[str, Any]]:
    """Compare searches with the proven optimum."""
    figures = []
    for num_layers, num_types in SIZES:
        figures += quality(
            "reinforce", draw(num_layers, num_types, num_cases, seed), f"{num_layers}x{num_types}"
        )
    figures += warm_start(draw(32, 4, max(1, num_cases // 3), seed), seed)
    small = draw(16, 4, min(num_cases, NUM_COMPARED), seed)
    for name in ("reinforce-paper", "reinforce-rnn", "bayesian"):
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


def warm_start(problems: Sequence[SchedulingProblem], seed: int) -> list[dict[str, Any]]:
    """Return figures of searches after a price change: warm, cold with as many evaluations, and exact."""
    random = np.random.default_rng(seed)
    results: dict[str, list[SearchResult]] = {"reinforce_warm": [], "reinforce_cold": []}
    exact_seconds = []
    for index, problem in enumerate(problems):
        cold = ReinforceScheduler()
        _, policy = cold.search_and_keep(
            problem, budget_evaluations=cold.default_budget_evaluations, seed=index
        )
        changed = with_scaled_prices(problem, random)
        for name, search in (
            ("reinforce_warm", ReinforceScheduler(warm_start=policy)),
            ("reinforce_cold", cold),
        ):
            results[name].append(
                search.search(changed, budget_evaluations=WARM_BUDGET_EVALUATIONS, seed=index)
            )
        exact_seconds.append(timed(lambda changed=changed: find_optimum(changed)))
    return [
        *near_and_seconds(results["reinforce_warm"], "reinforce_warm", "32x4"),
        *near_and_seconds(results["reinforce_cold"], "reinforce_cold_at_warm_budget", "32x4"),
        figure("exact_replan_median_seconds_32x4", statistics.median(exact_seconds), "s", higher=False),
    ]


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
