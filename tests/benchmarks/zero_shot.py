"""What the shipped policy is worth, alone and as the start of `reinforce`, beside the same without learning.

Problems that the policy was not trained on: other seeds (16 x 4, 32 x 4, and 16 x 4 with scarce units and floors) and
a size beyond all that it saw (48 x 10). Without learning the same decoding gets logits that know nothing, those of an
untrained network, or each layer's cheapest type. What needs no policy at all stands beside: the best of the cheapest
partitions for eight stage times, which is how `exact` begins.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.cost_model.run_tables import segment_table
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.provisioning.replica_balance import FixedStages
from heterps_core.planning.search.chain_partition import cheapest_partitions
from heterps_core.planning.search.learned.placement_policy import (
    PlacementPolicy,
    placement_logits,
    policy_features,
)
from heterps_core.planning.search.optimum import find_optimum, stage_time_range
from heterps_core.planning.search.plan_rater import PlanRater
from heterps_core.planning.search.schedulers.base import ProposingScheduler
from heterps_core.planning.search.schedulers.genetic import GeneticScheduler
from heterps_core.planning.search.schedulers.policy_gradient import seeded_torch
from heterps_core.planning.search.schedulers.reinforce import ReinforceScheduler, ReinforceSettings
from tests.benchmarks.planner import MAX_UNITS, figure, show
from tests.builders import make_problem

SIZES = {"16x4": (16, 4), "32x4": (32, 4), "16x4_caps": (16, 4), "48x10": (48, 10)}
WANTED = ("16x4", "32x4")
BUDGETS = {"zero_shot": 256, "search": 4_000}
NUM_STAGE_TIMES = 8
NEAR = 1e-3
NO_PLAN = 1_000.0
"""Gap that stands for a search without a plan."""


def evenly(problem: SchedulingProblem) -> Floats:
    """Return logits that know nothing but that stages have more than one layer, as most plans have few of them."""
    num_types = len(problem.device_types)
    rows = np.vstack([2 * np.eye(num_types), np.zeros((1, num_types))])
    return np.tile(rows, (problem.num_layers, 1, 1))


def untrained(problem: SchedulingProblem) -> Floats:
    """Return the logits of a fresh network."""
    features = policy_features(problem)
    with seeded_torch(0), torch.no_grad():
        logits: Floats = PlacementPolicy(features.shape[2], 48)(features[None])[0].double().numpy()
    return logits


def greedily(problem: SchedulingProblem) -> Floats:
    """Return logits that prefer, in each layer, the types on which its computing costs least."""
    usd = np.array(
        [
            [
                layer.compute_seconds[name] * unit.price_usd_per_hour
                for name, unit in problem.device_types.items()
            ]
            for layer in problem.layers
        ]
    )
    return np.asarray(evenly(problem) - np.log(usd / usd.min(axis=1, keepdims=True))[:, None])


LOGITS: dict[str, Callable[[SchedulingProblem], Floats]] = {
    "policy": placement_logits,
    "untrained": untrained,
    "evenly": evenly,
    "greedy": greedily,
}

SEARCHES: dict[str, Callable[[], ProposingScheduler]] = {
    "policy": ReinforceScheduler,
    "policy_without_learning": lambda: ReinforceScheduler(ReinforceSettings(learning_rate=0.0)),
    "untrained": lambda: ReinforceScheduler(first_logits=untrained),
    "evenly": lambda: ReinforceScheduler(first_logits=evenly),
    "evenly_without_learning": lambda: ReinforceScheduler(
        ReinforceSettings(learning_rate=0.0), first_logits=evenly
    ),
    "genetic": GeneticScheduler,
}


@dataclass(frozen=True, slots=True)
class Found:
    """A search for one problem."""

    gap: float
    """Of its cost to the proven bound."""

    milliseconds: float
    """Processor time."""


def run(*, seed: int = 0, num_cases: int = 40) -> list[dict[str, Any]]:
    """Compare the policy with what does without, alone and as the start of a search."""
    torch.set_num_threads(1)
    placement_logits(make_problem(0, num_layers=2, num_types=2))  # loads the file
    figures, wanted = [], []
    for name in SIZES:
        problems = list(drawn(name, num_cases if name != "48x10" else max(1, num_cases // 4), seed))
        shots = {
            each: [shot(ReinforceScheduler(first_logits=logits), *problem) for problem in problems]
            for each, logits in LOGITS.items()
        }
        shots["partitions"] = [best_partition(*problem) for problem in problems]
        shots["exact"] = [proof(problem) for problem, _ in problems]
        for each, found in shots.items():
            figures += [
                figure(f"zero_shot_{each}_gap_median_{name}", median_gap(found), "ratio", higher=False),
                figure(f"zero_shot_{each}_milliseconds_{name}", median_time(found), "ms", higher=False),
            ]
        wanted += shots["policy"] if name in WANTED else []
        for each, new_search in SEARCHES.items():
            found = [
                searched(new_search(), *problem, seed=case_seed, budget=BUDGETS["search"])
                for problem in problems
                for case_seed in (1, 2)
            ]
            near = float(np.mean([each.gap <= NEAR for each in found]))
            figures += [
                figure(f"search_{each}_gap_median_{name}", median_gap(found), "ratio", higher=False),
                figure(f"search_{each}_share_within_0.1_percent_{name}", near, "share"),
                figure(f"search_{each}_milliseconds_{name}", median_time(found), "ms", higher=False),
            ]
    figures = [
        figure("zero_shot_milliseconds", median_time(wanted), "ms", higher=False),
        figure("zero_shot_gap_median", median_gap(wanted), "ratio", higher=False),
        *figures,
    ]
    show(
        figures,
        f"{num_cases} unseen problems of each size, seed {seed}; searches of {BUDGETS['search']} plans",
    )
    return figures


def median_gap(found: list[Found]) -> float:
    """Return the median gap."""
    return statistics.median(each.gap for each in found)


def median_time(found: list[Found]) -> float:
    """Return the median processor time in milliseconds."""
    return statistics.median(each.milliseconds for each in found)


def drawn(name: str, num_cases: int, seed: int) -> Iterator[tuple[SchedulingProblem, float]]:
    """Yield problems and the least that a plan costs, in USD."""
    num_layers, num_types = SIZES[name]
    num_drawn = 0
    for case_seed in count(500_000 + 1_000 * seed):
        if num_drawn == num_cases:
            return
        problem = make_problem(
            case_seed,
            num_layers=num_layers,
            num_types=num_types,
            max_units=MAX_UNITS,
            scarce=name.endswith("caps"),
            floor_samples_per_s=0.0 if name.endswith("caps") else None,
        )
        try:
            optimum = find_optimum(problem)
            if name.endswith("caps"):
                fastest = evaluate(problem, optimum.stages).throughput_samples_per_s
                share = np.random.default_rng(case_seed).uniform(1, 3)
                problem = replace(problem, throughput_floor_samples_per_s=fastest * share)
                optimum = find_optimum(problem)
        except InfeasiblePlanError:
            continue
        num_drawn += 1
        yield problem, optimum.cost_lower_bound_usd


def shot(scheduler: ProposingScheduler, problem: SchedulingProblem, least_usd: float) -> Found:
    """Return the first round of a search."""
    return searched(scheduler, problem, least_usd, seed=0, budget=BUDGETS["zero_shot"], num_rounds=1)


def searched(
    scheduler: ProposingScheduler,
    problem: SchedulingProblem,
    least_usd: float,
    *,
    seed: int,
    budget: int,
    num_rounds: int | None = None,
) -> Found:
    """Return what a search finds within a budget of plans, its proof left aside."""
    started = time.process_time()
    rater = PlanRater(problem, budget_evaluations=budget)
    proposals = scheduler.propose(problem, budget_evaluations=budget, seed=seed)
    ratings = rater.rate(next(proposals))
    try:
        while rater.num_evaluations_left > 0 and num_rounds is None:
            ratings = rater.rate(proposals.send(ratings))
    except StopIteration:
        pass
    milliseconds = (time.process_time() - started) * 1e3
    gap = rater.history[-1].best_cost_usd / least_usd - 1 if rater.history else NO_PLAN
    return Found(gap, milliseconds)


def best_partition(problem: SchedulingProblem, least_usd: float) -> Found:
    """Return the best of the cheapest partitions for some stage times, with exact replicas."""
    started = time.process_time()
    table, objective = segment_table(problem), objective_of(problem)
    low_seconds, high_seconds = stage_time_range(problem, table)
    high_seconds = min(high_seconds, problem.stage_seconds_limit)
    replicas = table.least_replicas(np.geomspace(low_seconds, high_seconds, NUM_STAGE_TIMES))
    product = np.inf
    for rows in cheapest_partitions(table.usd_per_hour(replicas)).rows:
        if rows[0] >= 0:
            stages = FixedStages.of_rows(table, objective, rows[rows >= 0][::-1])
            found = stages.cheapest_replicas(limit_seconds=problem.stage_seconds_limit, below_product=product)
            product = min(product, found.product)
    milliseconds = (time.process_time() - started) * 1e3
    return Found(min(objective.cost_usd(product) / least_usd - 1, NO_PLAN), milliseconds)


def proof(problem: SchedulingProblem) -> Found:
    """Return what the optimum takes with its proof."""
    started = time.process_time()
    optimum = find_optimum(problem)
    milliseconds = (time.process_time() - started) * 1e3
    return Found(optimum.cost_usd / optimum.cost_lower_bound_usd - 1, milliseconds)
