"""How fast the planner is, on random problems: the exact optimum, the same after a price change, and one plan
rated within a batch.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.plan_rater import PlanRater
from tests.benchmarks.planner import draw, figure, show, timed, with_scaled_prices


def run(*, seed: int = 0, num_cases: int = 10) -> list[dict[str, Any]]:
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


def evaluation_microseconds(seed: int, *, num_batches: int = 100, plans_per_batch: int = 256) -> float:
    """Return the amortised time of rating one plan of 16 layers x 4 types in a batch."""
    [problem] = draw(16, 4, 1, seed)
    rater = PlanRater(problem, budget_evaluations=10**9)
    random = np.random.default_rng(seed)
    batches = [random.integers(4, size=(plans_per_batch, 16)) for _ in range(num_batches)]
    seconds = timed(lambda: [rater.rate(batch) for batch in batches])
    return seconds / (num_batches * plans_per_batch) * 1e6
