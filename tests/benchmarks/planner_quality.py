"""How good the searches for a plan are and how long they take, on random problems, on one core.

How far each method's plan is from the proven optimum after so many rated plans, on nights with tight caps by the
trainer's step (the table of docs/COMPARISON.md); how fast the exact search is, also after a price change, and how
fast one plan is rated within a batch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.plan_rater import PlanRater
from heterps_core.planning.search.schedulers import get_scheduler
from heterps_core.planning.search.schedulers.base import Scheduler
from tests.benchmarks.planner import draw, figure, show, timed, with_scaled_prices
from tests.benchmarks.planner_proofs import draw_nights

NEAR = 1e-3

SIZES = ((16, 4), (32, 4))

LARGE = (100, 10)
"""Layers and device types of problems that only the exact search gets, a few of them."""

SIZES_OF_NIGHTS = ((9, 3), (16, 4), (19, 6))
METHODS = ("exact", "reinforce", "genetic", "tapp", "reinforce-paper", "bayesian", "greedy", "heuristic")
BUDGETS = (2_000, 4_000)
"""Plans that a method may rate."""

OTHER_BUDGETS = {"exact": (1,), "bayesian": (500,)}
"""`exact` constructs its plan; the time of Bayesian search grows with the cube of the plans."""


def run(*, seed: int = 0, num_cases: int = 100) -> list[dict[str, Any]]:
    """Compare searches with the proven optimum, and time the exact one."""
    figures = speed(seed, num_cases=max(1, num_cases // 10))
    for num_layers, num_types in SIZES_OF_NIGHTS:
        nights = list(islice(_proven_nights(num_layers, num_types, seed), num_cases))
        print(f"\n{len(nights)} nights of {num_layers} layers and {num_types} device types with tight caps\n")
        print("| method | plans | share with a plan | within 0.1 % | median gap | CPU s |")
        print("| --- | --- | --- | --- | --- | --- |")
        for method in METHODS:
            figures += quality(method, nights, f"{num_layers}x{num_types}")
    show(figures, f"{num_cases} random problems of each size, seed {seed}")
    return figures


class Night(NamedTuple):
    """A problem and the cost that no plan undercuts."""

    problem: SchedulingProblem
    bound_usd: float


def _proven_nights(num_layers: int, num_types: int, seed: int) -> Iterator[Night]:
    """Yield nights that have a plan, none of which a method or the policy has seen."""
    for problem in draw_nights(num_layers, num_types, seed=seed + 100):
        try:
            yield Night(problem, find_optimum(problem).cost_lower_bound_usd)
        except InfeasiblePlanError:
            continue


def quality(method: str, nights: Sequence[Night], size: str) -> list[dict[str, Any]]:
    """Return share with a plan, share near the optimum, median gap and processor seconds of a method's searches."""
    search, budgets = get_scheduler(method), OTHER_BUDGETS.get(method, BUDGETS)
    found = [_search(search, night, budgets, seed=index) for index, night in enumerate(nights)]
    spent = statistics.median(each.processor_seconds for each in found)
    figures = []
    for number, budget in enumerate(budgets):
        gaps = np.array([each.gaps[number] for each in found])
        with_plan, near, median = np.isfinite(gaps).mean(), (gaps <= NEAR).mean(), np.median(gaps)
        seconds = f"{spent:.2f}" if budget == budgets[-1] else ""
        print(
            f"| {method} | {budget:,} | {with_plan:.2f} | {near:.2f} | {median:.2%} | {seconds} |", flush=True
        )
        prefix = f"{method.replace('-', '_')}_{{}}_{size}_{budget}"
        figures += [
            figure(prefix.format("share_with_a_plan"), with_plan, "share"),
            figure(prefix.format("share_within_0.1_percent"), near, "share"),
        ]
        if np.isfinite(median):
            figures.append(figure(prefix.format("median_gap"), median, "share", higher=False))
    seconds_name = f"{method.replace('-', '_')}_median_processor_seconds_{size}"
    return [*figures, figure(seconds_name, spent, "s", higher=False)]


class _Search(NamedTuple):
    gaps: tuple[float, ...]
    """Cost over bound less 1 after each budget, infinite without a plan."""

    processor_seconds: float


def _search(search: Scheduler, night: Night, budgets: Sequence[int], *, seed: int) -> _Search:
    """Search with the largest budget; no method goes about its first plans by the size of its budget."""
    bound_usd = None if search.name == "exact" else night.bound_usd  # its time is that of its proof
    started = time.process_time()
    try:
        found = search.search(night.problem, budget_evaluations=budgets[-1], seed=seed, proven_usd=bound_usd)
        history = () if found.evaluation.violations else found.history
    except InfeasiblePlanError:
        history = ()
    costs = (
        min((point.best_cost_usd for point in history if point.num_evaluations <= budget), default=math.inf)
        for budget in budgets
    )
    return _Search(tuple(cost / night.bound_usd - 1 for cost in costs), time.process_time() - started)


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
