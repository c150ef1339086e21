"""Whether "no plan is cheaper" is true: proven bounds held against a MILP, brute force and every other search.

The problems are random and their caps on units are small, as that is where a proof is hard. A false proof is a plan,
by any method, that costs less than the bound; a wrong "infeasible" is a plan where there should be none. And how many
nights with tight caps `exact` settles within ten seconds of processor time.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.extra_costs import NO_EXTRA_COSTS, ExtraCosts
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from heterps_core.planning.search.optimum import find_optimum, highest_throughput
from heterps_core.planning.search.schedulers import SCHEDULERS, get_scheduler
from tests.benchmarks.planner import MAX_UNITS, figure, show
from tests.builders import make_problem, with_exchange_work
from tests.independent_planner import CandidateStages, CheaperPlanSearch

SIZES = ((4, 3), (5, 3), (8, 3), (8, 4), (10, 4), (12, 4), (14, 5), (16, 5))
SIZES_OF_NIGHTS = ((9, 3), (10, 5), (16, 4), (19, 6))
LIMIT_S, NEAR = 10.0, 1e-4
"""Of processor time for a proof; gap up to which a plan counts as proven, as simulations differ from the formula."""

MAX_LAYERS_OF_BRUTE_FORCE = 5
MAX_LAYERS_OF_EDGE = 10
"""The highest throughput of longer chains takes seconds to find."""

CHARGED_EVERY = 5
"""Each fifth problem is charged for start-up, transfers and interruptions, which the MILP does not know."""

TRAINERS_EVERY, EXCHANGES_EVERY = 2, 4
"""Every other problem has the trainer's step, every fourth one in which peers of an exchange cost processor time."""

BUDGETS = dict.fromkeys(SCHEDULERS.keys() - {"exact"}, 200) | {"bayesian": 12, "brute-force": 5_000}
"""Plans rated by each other method; Bayesian search takes milliseconds for one."""

SHOWN_EVERY = 50
"""Problems after which the counts so far are printed, as a run of 1,000 takes over an hour."""

LONGEST_DRAW_S = 30.0
"""Search for the plan without caps that the caps of a tight problem are made of."""

SAME_COST = 1e-9
"""Relative difference of two sums of the same plan; a proof is false beyond it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What was found about the proof for one problem."""

    false_proofs: tuple[str, ...]
    """Methods that found a plan below the bound."""

    wrongly_infeasible: tuple[str, ...]
    """Methods that found a plan where none should be."""

    outcome: str
    """ "optimal", "gap" or "infeasible"."""

    num_checks: int
    is_bound_by_caps: bool


def run(*, seed: int = 0, num_cases: int = 1_000) -> list[dict[str, Any]]:
    """Check the proofs of random problems with small caps."""
    counts: Counter[str] = Counter()
    for index in range(num_cases):
        problem = draw_capped(seed=seed * 1_000_000 + index)
        verdict = examine(problem, seed=index)
        for name in verdict.false_proofs + verdict.wrongly_infeasible:
            print(f"{problem.model}: {name} contradicts the proof ({verdict.outcome})", flush=True)
        counts.update(
            {
                "false_proofs": bool(verdict.false_proofs),
                "wrongly_infeasible": bool(verdict.wrongly_infeasible),
                "checks": verdict.num_checks,
                "bound_by_caps": verdict.is_bound_by_caps,
                verdict.outcome: 1,
            }
        )
        if (index + 1) % SHOWN_EVERY == 0:
            print(f"{index + 1} problems: {dict(counts)}", flush=True)
    figures = [
        figure("problems", num_cases, "count"),
        figure("problems_bound_by_caps", counts["bound_by_caps"], "count"),
        figure("proven_optimal", counts["optimal"], "count"),
        figure("proven_with_gap", counts["gap"], "count", higher=False),
        figure("proven_infeasible", counts["infeasible"], "count"),
        figure("checks", counts["checks"], "count"),
        figure("false_proofs", counts["false_proofs"], "count", higher=False),
        figure("wrongly_infeasible", counts["wrongly_infeasible"], "count", higher=False),
    ]
    figures += proofs_within_limit(seed, num_cases=max(1, num_cases // 10))
    show(figures, f"{num_cases} random problems with small caps, seed {seed}")
    return figures


class Proof(NamedTuple):
    """The end of one proof."""

    is_settled: bool
    """The cheapest plan is proven, or that there is none."""

    gap: float
    processor_seconds: float
    wall_over_limit: float


def proofs_within_limit(seed: int, *, num_cases: int) -> list[dict[str, Any]]:
    """Return how many nights of each size `exact` settles within its limit, and the worst time over the limit."""
    figures = []
    for num_layers, num_types in SIZES_OF_NIGHTS:
        drawn = islice(draw_nights(num_layers, num_types, seed=seed), num_cases)
        proofs = [_timed_proof(problem) for problem in drawn]
        size = f"{num_layers}x{num_types}"
        spent = [proof.processor_seconds for proof in proofs]
        figures += [
            figure(f"proven_{size}", np.mean([proof.is_settled for proof in proofs]), "share"),
            figure(f"worst_gap_{size}", max(proof.gap for proof in proofs), "share", higher=False),
            figure(f"median_processor_seconds_{size}", np.median(spent), "s", higher=False),
            figure(f"worst_processor_seconds_{size}", max(spent), "s", higher=False),
            figure(
                f"worst_wall_over_limit_{size}",
                max(proof.wall_over_limit for proof in proofs),
                "ratio",
                higher=False,
            ),
        ]
        print(f"{size}: {num_cases} nights, load {os.getloadavg()[0]:.1f}", flush=True)
    return figures


def _timed_proof(problem: SchedulingProblem) -> Proof:
    processor, wall = time.process_time(), time.perf_counter()
    gap = 0.0
    try:
        found = find_optimum(problem, seconds=LIMIT_S)
        gap = found.cost_usd / found.cost_lower_bound_usd - 1
        is_settled = gap <= NEAR
    except InfeasiblePlanError as error:
        is_settled = error.constraint != "constraints"
    wall = time.perf_counter() - wall
    return Proof(is_settled, gap, time.process_time() - processor, wall / LIMIT_S)


def draw_capped(*, seed: int) -> SchedulingProblem:
    """Return a random problem in which units are scarce; some have a floor that is just out of reach."""
    random = np.random.default_rng(seed)
    num_layers, num_types = SIZES[seed % len(SIZES)]
    problem = make_problem(
        seed, num_layers=num_layers, num_types=num_types, scarce=bool(random.random() < 0.3)
    )
    same_cap = int(random.choice([15, 20, 30, 60]))
    largest_cap = int(random.choice([4, 12, 60]))
    is_same = random.random() < 0.7
    units = {
        name: replace(unit, max_units=same_cap if is_same else int(random.integers(1, largest_cap + 1)))
        for name, unit in problem.device_types.items()
    }
    # A third of the builder's tables, or most problems would fit into no caps of this size.
    layers = tuple(replace(layer, state_bytes=layer.state_bytes // 3) for layer in problem.layers)
    problem = replace(
        problem,
        layers=layers,
        device_types=units,
        throughput_floor_samples_per_s=0,
        single_replica_communicates=seed % 3 != 0,
    )
    if seed % CHARGED_EVERY == 0:
        problem = charged(problem, random)
    if seed % TRAINERS_EVERY == 1:
        problem = replace(problem, step_model=StepModel.TRAINER)
    if seed % EXCHANGES_EVERY == 1:
        problem = with_exchange_work(problem, seed)
    return replace(problem, throughput_floor_samples_per_s=_draw_floor(problem, random))


def _draw_floor(problem: SchedulingProblem, random: np.random.Generator) -> float:
    """Return no floor, one within reach, or one at the edge of it."""
    kind = random.choice(["none", "above", "edge"], p=[0.1, 0.7, 0.2])
    if kind == "none":
        return 0.0
    if kind == "edge" and problem.num_layers <= MAX_LAYERS_OF_EDGE:
        return float(highest_throughput(problem) * random.choice([0.999, 1.001]))
    try:
        cheapest = evaluate(problem, find_optimum(problem).stages)
    except InfeasiblePlanError:
        return 0.0
    return float(cheapest.throughput_samples_per_s * random.uniform(1, 4))


def examine(problem: SchedulingProblem, *, seed: int) -> Verdict:
    """Hold the proof of one problem against all that may contradict it."""
    try:
        optimum = find_optimum(problem)
    except InfeasiblePlanError:
        bound_usd, outcome = math.inf, "infeasible"
    else:
        bound_usd = optimum.cost_lower_bound_usd
        outcome = "optimal" if bound_usd == optimum.cost_usd else "gap"
    contradictions, num_checks = [], 0
    for name, cost_usd in _found_by_others(problem, below_usd=bound_usd * (1 - SAME_COST), seed=seed):
        num_checks += 1
        if cost_usd < bound_usd * (1 - SAME_COST):
            contradictions.append(name)
    return Verdict(
        false_proofs=() if outcome == "infeasible" else tuple(contradictions),
        wrongly_infeasible=tuple(contradictions) if outcome == "infeasible" else (),
        outcome=outcome,
        num_checks=num_checks,
        is_bound_by_caps=_is_cheaper_without_caps(problem, bound_usd),
    )


def _found_by_others(
    problem: SchedulingProblem, *, below_usd: float, seed: int
) -> Iterator[tuple[str, float]]:
    """Yield each method with the cost of the plan that it found, infinite where it found none that matters."""
    # A plan that the formula of the trainer's step allows may miss the floor when it is simulated.
    is_held_to_formula = problem.step_model is StepModel.PAPERS or math.isfinite(below_usd)
    if problem.extra_costs == NO_EXTRA_COSTS and is_held_to_formula:
        for lengths, stages in CandidateStages.of_every_length(problem).items():
            yield "MILP", CheaperPlanSearch(stages, lengths).cheapest_below(below_usd)
            if problem.num_layers <= MAX_LAYERS_OF_BRUTE_FORCE:
                yield "all plans", stages.brute_force_usd()
    for name, budget in BUDGETS.items():
        if name == "brute-force" and problem.num_layers > MAX_LAYERS_OF_BRUTE_FORCE:
            continue
        try:
            found = get_scheduler(name).search(problem, budget_evaluations=budget, seed=seed)
        except InfeasiblePlanError:
            yield name, math.inf
        except AssertionError:  # the planner itself saw that the plan contradicts the bound
            yield name, -math.inf
        else:
            # Where the judge of the trainer's step refuses every plan, methods still hand theirs back.
            yield name, math.inf if found.evaluation.violations else found.plan.cost_usd


def _is_cheaper_without_caps(problem: SchedulingProblem, bound_usd: float) -> bool:
    units = {name: replace(unit, max_units=10_000) for name, unit in problem.device_types.items()}
    try:
        return find_optimum(replace(problem, device_types=units)).cost_usd < bound_usd * (1 - SAME_COST)
    except InfeasiblePlanError:
        return False


def charged(problem: SchedulingProblem, random: np.random.Generator) -> SchedulingProblem:
    """Return the problem with extra costs, its types in two zones and partly on spot."""
    units = {
        name: replace(unit, interruptions_per_hour=float(random.choice([0.0, 0.02, 0.4])))
        for name, unit in problem.device_types.items()
    }
    charges = ExtraCosts(
        startup_seconds=200.0,
        teardown_seconds=30.0,
        storage_usd_per_hour=0.2,
        checkpoint_seconds=float(random.choice([0.0, 20.0])),
        restart_seconds=180.0,
    )
    return replace(problem, device_types=units, extra_costs=charges)


def draw_tight(num_layers: int, num_types: int, *, seed: int) -> Iterator[SchedulingProblem]:
    """Yield random problems of both step models in which the cheapest plan without caps breaks them."""
    for case_seed in count(1_000_000 * (seed + 1)):
        problem = make_problem(case_seed, num_layers=num_layers, num_types=num_types, max_units=MAX_UNITS)
        problem = replace(problem, step_model=StepModel.TRAINER if case_seed % 2 else StepModel.PAPERS)
        yield from _with_tight_caps(problem, case_seed)


def draw_nights(num_layers: int, num_types: int, *, seed: int) -> Iterator[SchedulingProblem]:
    """Yield the like as nights pose them: the trainer's step, in which exchanges cost replicas processor time."""
    for case_seed in count(1_000_000 * (seed + 1)):
        problem = make_problem(case_seed, num_layers=num_layers, num_types=num_types, max_units=MAX_UNITS)
        problem = replace(problem, step_model=StepModel.TRAINER, single_replica_communicates=False)
        yield from _with_tight_caps(with_exchange_work(problem, case_seed), case_seed)


def _with_tight_caps(problem: SchedulingProblem, case_seed: int) -> Iterator[SchedulingProblem]:
    """Yield the problem with half to nine tenths of the units of its cheapest plan, nothing where it has none."""
    random = np.random.default_rng(case_seed)
    try:
        stages = find_optimum(problem, seconds=LONGEST_DRAW_S).stages
    except InfeasiblePlanError:
        return
    used = Counter({stage.device_type: 0 for stage in stages})
    for stage in stages:
        used[stage.device_type] += stage.num_replicas
    typical = max(1, int(np.mean(list(used.values()))))
    units = {
        name: replace(unit, max_units=max(1, int(used.get(name, typical) * float(random.uniform(0.5, 0.9)))))
        for name, unit in problem.device_types.items()
    }
    problem = replace(problem, device_types=units)
    yield charged(problem, random) if case_seed % CHARGED_EVERY == 0 else problem
