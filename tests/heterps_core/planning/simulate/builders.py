"""Plans for random problems: any cut at all, and cuts whose stages keep pace with one another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.plans.scheduling_plan import Stage
from tests.heterps_core.planning.plain_stage import plain_stage

MAX_STAGES = 6
MAX_REPLICAS = 40
MAX_BALANCED_REPLICAS = 300


def random_plan(problem: SchedulingProblem, random: np.random.Generator) -> tuple[Stage, ...]:
    """Return 1 to 6 stages of 1 to 40 replicas, cut anywhere, that the problem allows."""
    num_stages = int(random.integers(1, min(MAX_STAGES, problem.num_layers) + 1))
    cuts = np.sort(random.choice(np.arange(1, problem.num_layers), num_stages - 1, replace=False)).tolist()
    stages: list[Stage] = []
    for first, behind in zip([0, *cuts], [*cuts, problem.num_layers], strict=True):
        before = stages[-1].device_type if stages and problem.neighbours_differ else None
        names = [name for name in problem.device_types if name != before]
        num_replicas = int(random.integers(1, MAX_REPLICAS + 1))
        stages.append(Stage(first, behind - 1, str(random.choice(names)), num_replicas))
    return tuple(stages)


def balanced_plan(problem: SchedulingProblem, random: np.random.Generator) -> tuple[Stage, ...]:
    """Return a random cut with the least replicas that keep a common stage time, as provisioning gives them."""
    stages = random_plan(problem, random)
    least_seconds = max(
        plain_stage(problem, replace(stage, num_replicas=MAX_BALANCED_REPLICAS)).seconds for stage in stages
    )
    allowed_seconds = least_seconds * float(random.uniform(1.2, 4.0))
    return tuple(_least_replicas(problem, stage, allowed_seconds) for stage in stages)


def _least_replicas(problem: SchedulingProblem, stage: Stage, allowed_seconds: float) -> Stage:
    candidates = (replace(stage, num_replicas=k) for k in range(1, MAX_BALANCED_REPLICAS + 1))
    return next(s for s in candidates if plain_stage(problem, s).seconds <= allowed_seconds)
