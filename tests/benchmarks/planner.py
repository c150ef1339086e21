"""What the benchmarks of the planner share: random problems, figures and their table."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.optimum import find_optimum
from tests.builders import make_problem

MAX_UNITS = 400


def draw(num_layers: int, num_types: int, num_cases: int, seed: int) -> list[SchedulingProblem]:
    """Return random problems with loose caps; the few draws that no plan can meet are passed over."""
    problems: list[SchedulingProblem] = []
    for case_seed in count(1_000 * (seed + 1)):
        if len(problems) == num_cases:
            break
        problem = make_problem(case_seed, num_layers=num_layers, num_types=num_types, max_units=MAX_UNITS)
        try:
            find_optimum(problem)
        except InfeasiblePlanError:
            continue
        problems.append(problem)
    return problems


def with_scaled_prices(problem: SchedulingProblem, random: np.random.Generator) -> SchedulingProblem:
    """Return the problem with every price times 0.7 to 1.4, as spot prices move in a night."""
    return replace(
        problem,
        device_types={
            name: replace(unit, price_usd_per_hour=unit.price_usd_per_hour * random.uniform(0.7, 1.4))
            for name, unit in problem.device_types.items()
        },
    )


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
