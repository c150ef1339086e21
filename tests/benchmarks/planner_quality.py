"""How good the learning searches for a plan are, on random problems, on one core.

How often a search ends within 0.1 % of the proven optimum, and how long it takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.schedulers import get_scheduler
from heterps_core.planning.search.search_result import SearchResult
from tests.benchmarks.planner import draw, figure, show

NEAR = 1e-3

SIZES = ((16, 4), (32, 4))

NUM_COMPARED = 5
"""Problems on which the weaker searches run too; a run of theirs takes several seconds."""


def run(*, seed: int = 0, num_cases: int = 100) -> list[dict[str, Any]]:
    """Compare searches with the proven optimum."""
    figures = []
    for num_layers, num_types in SIZES:
        figures += quality(
            "reinforce", draw(num_layers, num_types, num_cases, seed), f"{num_layers}x{num_types}"
        )
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
