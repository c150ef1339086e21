"""Whether plans keep what they promise: the trainer's step of the planner beside its simulation.

Random problems of the planning contract, planned by the trainer's step (`cost_model/step_model.py`). Promised over
simulated cost, of random plans and of those that `exact` chooses; floors that chosen plans keep in simulation; and
what a chosen plan costs more, simulated, than the best one that any method or a local search over simulated costs
finds. What is promised is simulated too, over fewer steps; how far the formula alone is off is reported beside.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.cost_model.run_tables import segment_row, segment_table
from heterps_core.planning.problem.extra_costs import ExtraCosts
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from heterps_core.planning.search.optimum import find_optimum, highest_throughput
from heterps_core.planning.search.schedulers import SCHEDULERS, get_scheduler
from heterps_core.planning.simulate.pipeline_load import pipeline_load
from heterps_core.planning.simulate.pipeline_simulation import simulate
from heterps_core.planning.simulate.plan_simulation import run_cost_usd
from heterps_core.plans.scheduling_plan import Stage
from tests.benchmarks.planner import figure, show
from tests.builders import make_problem

NUM_RANDOM_PLANS, NUM_CHOSEN_PLANS = 100, 40
SIZES = ((6, 3), (10, 3), (16, 4))
OTHERS = sorted(SCHEDULERS.keys() - {"exact", "brute-force", "bayesian"})
BUDGET_EVALUATIONS = 300
NUM_STEPS = 60
MANY_STEPS = 240
"""Promises are held against so many, with nothing of the formula in the judge."""

SIMULATION_TOLERANCE = 1e-3
"""Relative difference of a step's mean time over few and over many steps."""

NUM_MOVES = 150
"""Neighbours of a plan that the local search simulates."""

MOST_STAGES = 5
EXTRA_COSTS = ExtraCosts(
    startup_seconds=120.0,
    teardown_seconds=30.0,
    storage_usd_per_hour=0.05,
    checkpoint_seconds=5.0,
    restart_seconds=130.0,
)


def run(*, seed: int = 0) -> list[dict[str, Any]]:
    """Plan, simulate, print a table and return its figures in the form of the benchmark contract."""
    random = np.random.default_rng(seed)
    problems = [draw(seed * 1_000 + index) for index in range(NUM_CHOSEN_PLANS)]
    errors, formula_errors = [], []
    while len(errors) < NUM_RANDOM_PLANS:
        problem = problems[len(errors) % len(problems)]
        plan = random_plan(problem, random)
        errors.append(promise_error(problem, plan))
        formula_errors.append(formula_error(problem, plan))
    chosen_errors, floors, regrets = [], [], []
    for problem in problems:
        try:
            chosen = find_optimum(problem).stages
        except InfeasiblePlanError as error:
            print(f"{problem.model}: {error}")
            continue
        chosen_errors.append(promise_error(problem, chosen))
        floor = problem.throughput_floor_samples_per_s
        if floor:
            # As `heterps simulate` does, over fewer steps than what follows here.
            floors.append(evaluate(problem, chosen).throughput_samples_per_s >= floor * (1 - 1e-9))
        best_usd = min(simulated_usd(problem, stages) for stages in found_by_any(problem, chosen, random))
        regrets.append(simulated_usd(problem, chosen) / best_usd - 1)
    plain = [of_trainer(seed + index) for index in range(7)]
    tight = [replace(of_trainer(seed + index, scarce=True), extra_costs=EXTRA_COSTS) for index in range(7)]
    plain_seconds, tight_seconds = (
        statistics.median(map(seconds_to_plan, asked)) for asked in (plain, tight)
    )
    figures = [
        figure("promise_error_median", statistics.median(errors + chosen_errors), "ratio", higher=False),
        figure("promise_error_worst", max(errors + chosen_errors), "ratio", higher=False),
        figure("formula_error_median", statistics.median(formula_errors), "ratio", higher=False),
        figure("formula_error_worst", max(formula_errors), "ratio", higher=False),
        figure("floors_kept_share", statistics.fmean(floors), "ratio"),
        figure("regret_mean", statistics.fmean(regrets), "ratio", higher=False),
        figure("regret_worst", max(regrets), "ratio", higher=False),
        figure("trainer_step_seconds_32x4", plain_seconds, "s", higher=False),
        figure("trainer_step_seconds_32x4_caps_and_costs", tight_seconds, "s", higher=False),
    ]
    show(figures, f"{NUM_RANDOM_PLANS} random and {NUM_CHOSEN_PLANS} chosen plans, seed {seed}")
    return figures


def of_trainer(seed: int, **others: Any) -> SchedulingProblem:
    """Return a random problem of 32 layers and 4 device types."""
    problem = make_problem(seed, num_layers=32, num_types=4, **others)
    return replace(problem, step_model=StepModel.TRAINER)


def draw(seed: int) -> SchedulingProblem:
    """Return a random problem; two of three have a floor within reach, and half have scarce units."""
    random = np.random.default_rng(seed)
    num_layers, num_types = SIZES[seed % len(SIZES)]
    problem = replace(
        make_problem(
            seed, num_layers=num_layers, num_types=num_types, scarce=seed % 2 == 1, floor_samples_per_s=0.0
        ),
        step_model=StepModel.TRAINER,
        single_replica_communicates=seed % 4 >= 2,
    )
    try:
        highest = highest_throughput(problem)
    except InfeasiblePlanError:
        highest = 0.0
    if not highest:
        return draw(seed + 100_000)
    floor = highest * float(random.uniform(0.2, 0.8)) if seed % 3 else 0.0
    return replace(problem, throughput_floor_samples_per_s=floor)


def simulated_seconds(problem: SchedulingProblem, stages: Sequence[Stage], num_steps: int) -> float:
    """Return the simulated time of a step, by simulation alone."""
    count = evaluate(problem, stages).num_microbatches
    return simulate(pipeline_load(problem, stages, num_microbatches=count), num_steps=num_steps).step_seconds


def simulated_usd(problem: SchedulingProblem, stages: Sequence[Stage]) -> float:
    """Return the bill at the simulated speed; infinite where a constraint is broken, the floor in simulation."""
    evaluation = evaluate(problem, stages)
    if any(violation.constraint != "throughput floor" for violation in evaluation.violations):
        return math.inf
    # Buffers that fill let some dozen steps pass faster than the busiest stage can go for long.
    seconds = max(simulated_seconds(problem, stages, NUM_STEPS), evaluation.bottleneck.seconds)
    if seconds > problem.stage_seconds_limit * (1 + SIMULATION_TOLERANCE):
        return math.inf
    return run_cost_usd(problem, evaluation, step_seconds=seconds)


def promise_error(problem: SchedulingProblem, stages: Sequence[Stage]) -> float:
    """Return by how much of the simulated cost the promised one is off."""
    evaluation = evaluate(problem, stages)
    return abs(
        evaluation.cost_usd
        / run_cost_usd(problem, evaluation, step_seconds=simulated_seconds(problem, stages, MANY_STEPS))
        - 1
    )


def formula_error(problem: SchedulingProblem, stages: Sequence[Stage]) -> float:
    """Return by how much of the simulated step its formula is off."""
    slowest = max(part.seconds for part in evaluate(problem, stages).stages)
    return abs(slowest / simulated_seconds(problem, stages, MANY_STEPS) - 1)


def random_plan(problem: SchedulingProblem, random: np.random.Generator) -> tuple[Stage, ...]:
    """Return stages cut and placed at random, with the replicas that some stage time wants."""
    names = problem.device_type_names
    table = segment_table(problem, num_microbatches=16)
    while True:
        num_stages = int(random.integers(1, MOST_STAGES + 1))
        cuts = np.sort(
            random.choice(np.arange(1, problem.num_layers), num_stages - 1, replace=False)
        ).tolist()
        bounds = [0, *cuts, problem.num_layers]
        types = [int(random.integers(len(names)))]
        for _ in range(num_stages - 1):
            types.append(int((types[-1] + random.integers(1, len(names))) % len(names)))
        rows = [(segment_row(a, b - 1), t) for a, b, t in zip(bounds, bounds[1:], types, strict=False)]
        fastest = max(float(table.fastest_seconds()[row]) for row in rows)
        replicas = table.least_replicas(np.array([fastest * float(np.exp(random.uniform(0.1, 2.5)))]))[0]
        counts = [replicas[row] for row in rows]
        if np.isfinite(counts).all():
            return tuple(
                Stage(a, b - 1, names[t], int(k))
                for a, b, t, k in zip(bounds, bounds[1:], types, counts, strict=False)
            )


def found_by_any(
    problem: SchedulingProblem, chosen: tuple[Stage, ...], random: np.random.Generator
) -> Iterator[tuple[Stage, ...]]:
    """Yield the chosen plan, those of all methods, and what a local search from the chosen one comes by."""
    yield chosen
    for name in OTHERS:
        try:
            found = get_scheduler(name).search(problem, budget_evaluations=BUDGET_EVALUATIONS, seed=0)
        except InfeasiblePlanError:
            continue
        yield found.plan.stages
    best, best_usd = chosen, simulated_usd(problem, chosen)
    for _ in range(NUM_MOVES):
        moved = neighbour(problem, best, random)
        usd = simulated_usd(problem, moved)
        if usd < best_usd:
            best, best_usd = moved, usd
    yield best


def neighbour(
    problem: SchedulingProblem, stages: tuple[Stage, ...], random: np.random.Generator
) -> tuple[Stage, ...]:
    """Return the plan with another count of one stage, or one boundary moved by a layer."""
    changed = list(stages)
    index = int(random.integers(len(stages)))
    if random.random() < 0.6 or len(stages) == 1:
        step = int(random.choice([-2, -1, 1, 2]))
        changed[index] = replace(stages[index], num_replicas=max(1, stages[index].num_replicas + step))
        return tuple(changed)
    left, right = stages[max(index - 1, 0)], stages[max(index, 1)]
    cut = left.last_layer + int(random.choice([-1, 1]))
    if not left.first_layer <= cut < right.last_layer:
        return stages
    at = max(index - 1, 0)
    changed[at], changed[at + 1] = replace(left, last_layer=cut), replace(right, first_layer=cut + 1)
    return tuple(changed)


def seconds_to_plan(problem: SchedulingProblem) -> float:
    """Return how long `exact` takes; a proof that there is none counts as well."""
    started = time.perf_counter()
    with suppress(InfeasiblePlanError):
        find_optimum(problem)
    return time.perf_counter() - started
