"""How near to its bound `exact` comes within ten seconds where units are scarce.

Random problems in which the cheapest plan without caps breaks the caps: each type that it uses has half to nine
tenths of the units that it takes, and the other types have about as few. Half of the problems have the trainer's
step, and a fifth are charged for start-up, transfers and interruptions.
"""

from __future__ import annotations

import math
import re
import resource
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any

import numpy as np

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.schedulers.exact import ExactScheduler
from tests.benchmarks.planner import MAX_UNITS, figure, show
from tests.benchmarks.planner_proofs import charged
from tests.builders import make_problem

SIZES = ((32, 4), (100, 10), (200, 10))
MAX_SECONDS = 10.0
NEAR = 0.01
MAX_SECONDS_OF_DRAW = 30.0


def draw_tight(num_layers: int, num_types: int, *, seed: int) -> Iterator[SchedulingProblem]:
    """Yield random problems in which the cheapest plan without caps breaks them."""
    for case_seed in count(1_000_000 * (seed + 1)):
        random = np.random.default_rng(case_seed)
        problem = make_problem(case_seed, num_layers=num_layers, num_types=num_types, max_units=MAX_UNITS)
        problem = replace(problem, step_model=StepModel.TRAINER if case_seed % 2 else StepModel.PAPERS)
        try:
            stages = find_optimum(problem, seconds=MAX_SECONDS_OF_DRAW).stages
        except InfeasiblePlanError:
            continue
        used = Counter({stage.device_type: 0 for stage in stages})
        for stage in stages:
            used[stage.device_type] += stage.num_replicas
        typical = max(1, int(np.mean(list(used.values()))))
        units = {
            name: replace(
                unit, max_units=max(1, int(used.get(name, typical) * float(random.uniform(0.5, 0.9))))
            )
            for name, unit in problem.device_types.items()
        }
        problem = replace(problem, device_types=units)
        yield charged(problem, random) if case_seed % 5 == 0 else problem


def run(*, seed: int = 0, num_cases: int = 100) -> list[dict[str, Any]]:
    """Plan problems of three sizes within ten seconds each; a proof that there is no plan counts as one."""
    figures = []
    for num_layers, num_types in SIZES:
        problems = draw_tight(num_layers, num_types, seed=seed)
        seconds, gaps = [], []
        for problem in islice(problems, num_cases):
            started = time.perf_counter()
            gaps.append(gap_within(problem, MAX_SECONDS))
            seconds.append(time.perf_counter() - started)
            print(
                f"{num_layers}x{num_types} {problem.model}: gap {gaps[-1]:.4%}, {seconds[-1]:.1f} s",
                flush=True,
            )
        size = f"{num_layers}x{num_types}"
        near = [gap <= NEAR for gap in gaps]
        figures += [
            figure(f"anytime_share_within_1_percent_{size}", statistics.fmean(near), "share"),
            figure(f"anytime_gap_median_{size}", statistics.median(gaps), "ratio", higher=False),
            figure(f"anytime_seconds_worst_{size}", max(seconds), "s", higher=False),
        ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    figures.append(figure("anytime_peak_memory", peak, "GiB", higher=False))
    show(figures, f"{num_cases} random problems of each size with tight caps, seed {seed}")
    return figures


def gap_within(problem: SchedulingProblem, max_seconds: float) -> float:
    """Return the gap that is left after so many seconds; infinite without a plan that is not proven impossible."""
    try:
        found = ExactScheduler().search(problem, budget_evaluations=1, seed=0, max_seconds=max_seconds)
    except InfeasiblePlanError as error:
        return math.inf if re.search(r"\bmet\b", str(error)) else 0.0  # "no plan was met" is no proof
    return found.plan.optimality_gap
