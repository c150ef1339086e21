"""What the robust plan costs and saves where the times of GPUs are estimates, on random problems, on one core.

Computing and communication of each accelerator are within 30 % of their estimates, those of the processor are known.
Regrets are those of the cases that the choice is made by, and of cases that are drawn evenly within the spread.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.problem.estimates import estimates_of, with_errors
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, is_cpu
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.robust_choice import choose_robust, cost_or_infinite
from heterps_core.plans.scheduling_plan import Stage
from tests.benchmarks.planner import draw, figure, show

SPREAD = 0.3
NUM_DRAWN = 40
"""Cases a problem."""


def run(*, seed: int = 0, num_cases: int = 20) -> list[dict[str, Any]]:
    """Compare the worst regret of the cheapest plan and of the robust one, without floors of throughput and with."""
    problems = [with_estimated_gpus(problem) for problem in draw(16, 4, num_cases, seed)]
    without = [replace(problem, throughput_floor_samples_per_s=0.0) for problem in problems]
    figures = [*compared("", without, seed), *compared("floor_", problems, seed)]
    show(figures, f"{num_cases} random problems of 16x4, GPUs ±{SPREAD:.0%}, {NUM_DRAWN} drawn cases each")
    return figures


def compared(prefix: str, problems: Sequence[SchedulingProblem], seed: int) -> list[dict[str, Any]]:
    """Return median and most of the worst regrets and the extra cost, and how many cases break a limit."""
    random = np.random.default_rng(seed)
    shares: dict[str, list[float]] = {}
    broken: Counter[str] = Counter()
    for problem in problems:
        stages = find_optimum(problem).stages
        choice = choose_robust(problem, stages)
        shares.setdefault("robust_extra_cost", []).append(choice.cost_usd / choice.cost_at_hand_usd - 1)
        drawn = drawn_regrets(problem, [stages, choice.stages], random)
        regrets = (choice.regret_at_hand, choice.regret)
        for name, regret, in_drawn in zip(("cheapest", "robust"), regrets, drawn, strict=True):
            kept = [share for share in in_drawn if share < math.inf]
            shares.setdefault(f"{name}_worst_regret", []).append(regret.share)
            shares.setdefault(f"{name}_worst_drawn_regret", []).append(max(kept, default=0.0))
            broken[f"{name}_broken_cases"] += regret.num_broken
            broken[f"{name}_broken_drawn_cases"] += len(in_drawn) - len(kept)
    return [
        *(
            figure(f"{prefix}{name}_{kind}", of(values), "ratio", higher=False)
            for name, values in shares.items()
            for kind, of in (("median", statistics.median), ("most", max))
        ),
        *(figure(f"{prefix}{name}", value, "cases", higher=False) for name, value in broken.items()),
    ]


def with_estimated_gpus(problem: SchedulingProblem) -> SchedulingProblem:
    """Return the problem with a spread of all times but those of processors."""
    spreads = {name: 0.0 if is_cpu(name) else SPREAD for name in problem.device_types}
    units = {
        name: replace(unit, communication_relative_spread=spreads[name])
        for name, unit in problem.device_types.items()
    }
    layers = tuple(replace(layer, compute_relative_spread=spreads) for layer in problem.layers)
    return replace(problem, layers=layers, device_types=units)


def drawn_regrets(
    problem: SchedulingProblem, plans: list[tuple[Stage, ...]], random: np.random.Generator
) -> list[list[float]]:
    """Return for each plan its regret in each drawn case that has a plan; infinite where it breaks a constraint."""
    regrets: list[list[float]] = [[] for _ in plans]
    for _ in range(NUM_DRAWN):
        changed = with_errors(problem, {each: random.uniform(-1, 1) for each in estimates_of(problem)})
        try:
            best_usd = find_optimum(changed).cost_usd
        except InfeasiblePlanError:
            continue
        for mine, plan in zip(regrets, plans, strict=True):
            mine.append(cost_or_infinite(changed, plan) / best_usd - 1)
    return regrets
