"""Why TAPP lost on VGG-16 and Inception-V3, and what known limits and plans that need no search change.

Searches of 20 to 48 plans, each measured by a simulated step of two devices of unlike speed. The times of the blocks
were measured once, by `tapp_measured` of commit 094cb8a (`tests/golden/image_blocks.json`; 2 cores, one of them
without instructions beyond AVX, other work beside it, 2026-11-22). A device holds five stages at most, a plan with
more fails; it runs one pass at a time, backward passes first. So the best plan is known, and no noisy clock decides.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from heterps_core.errors import TrainingError
from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.problem.scheduling_problem import LayerCosts, SchedulingProblem, UnitType
from heterps_core.planning.search.measured_search import MEASURED_METHODS, Assignment, search_by_measuring
from heterps_core.planning.search.schedulers.base import Proposals, ProposingScheduler
from heterps_core.planning.search.schedulers.tapp import TappScheduler, TappSettings, root_cost_rewards
from heterps_core.text_table import Table
from tests.benchmarks.planner import figure
from tests.paths import TESTS

NUM_SEEDS = 5
STAGES_PER_DEVICE = 5
MOST_STAGES = 5
"""Of the plans among which the best one is sought."""

PENALTY_S = 10.0


class Chance(ProposingScheduler):
    """Draws a device for each block."""

    name = "chance"
    default_budget_evaluations = 100

    def propose(self, problem: SchedulingProblem, *, budget_evaluations: int, seed: int) -> Proposals:
        """Yield eight plans a round."""
        random = np.random.default_rng(seed)
        while True:
            yield random.integers(2, size=(8, problem.num_layers))


def published_tapp() -> ProposingScheduler:
    """Return TAPP as it was when it lost."""
    settings = TappSettings(most_groups=8, groupings_per_round=2, placements_per_grouping=2)
    return TappScheduler(settings, rewards=root_cost_rewards)


METHODS: dict[str, Callable[[], ProposingScheduler]] = {
    "chance": Chance,
    "tapp as published": published_tapp,
    **MEASURED_METHODS,
}


class Case(NamedTuple):
    """One model on two devices."""

    problem: SchedulingProblem
    seconds: Floats
    """Of each block and a batch on each device, shape (L, 2); a third of them is the forward pass."""

    cut_seconds: Floats
    """Of rows or gradients of a batch over each inner boundary, shape (L - 1,)."""

    num_microbatches: int
    budget: int


def load_case(model: str) -> Case:
    """Return one of the measured models."""
    known = json.loads((TESTS / "golden" / "image_blocks.json").read_text())[model]
    names = ("fast", "slow")
    layers = tuple(
        LayerCosts(
            name=name,
            kind="block",
            is_sharded=False,
            state_bytes=state_bytes,
            output_bytes_per_sample=output_bytes,
            compute_seconds=dict(zip(names, seconds, strict=True)),
            communication_seconds=dict.fromkeys(names, 0.0),
        )
        for name, state_bytes, output_bytes, *seconds in known["blocks"]
    )
    unit = UnitType(
        price_usd_per_hour=1.0,
        max_units=1,
        memory_bytes=8e9,
        bandwidth_bytes_per_s=known["link_bytes_per_s"],
        compute_parallel_fraction=1.0,
        communication_parallel_fraction=1.0,
    )
    batch_size = known["batch_size"]
    problem = SchedulingProblem(
        model=model,
        batch_size=batch_size,
        profile_batch_size=batch_size,
        num_samples=50_000,
        num_epochs=1,
        throughput_floor_samples_per_s=0,
        layers=layers,
        device_types=dict.fromkeys(names, unit),
    )
    outputs = np.array([layer.output_bytes_per_sample for layer in layers[:-1]])
    return Case(
        problem=problem,
        seconds=np.array([list(layer.compute_seconds.values()) for layer in layers]),
        cut_seconds=batch_size * outputs / known["link_bytes_per_s"],
        num_microbatches=known["num_microbatches"],
        budget=known["budget"],
    )


def stages_of(plan: Assignment) -> list[tuple[int, int, int]]:
    """Return first block, block behind the last, and device of each stage."""
    firsts = [block for block in range(len(plan)) if block == 0 or plan[block] != plan[block - 1]]
    return [(first, end, plan[first]) for first, end in zip(firsts, [*firsts[1:], len(plan)], strict=True)]


def is_allowed(plan: Assignment) -> bool:
    """Return whether no device holds more stages than it may."""
    devices = [device for *_, device in stages_of(plan)]
    return max(devices.count(0), devices.count(1)) <= STAGES_PER_DEVICE


def step_seconds(case: Case, plan: Assignment) -> float:
    """Return the time of a step: a device takes the pass that can begin first, a backward pass before a forward one.

    Raises:
        TrainingError: A device holds too many stages.
    """
    if not is_allowed(plan):
        raise TrainingError(f"a device must hold at most {STAGES_PER_DEVICE} stages")
    stages = stages_of(plan)
    last = len(stages) - 1
    num_microbatches = case.num_microbatches if last else 1
    forward = [case.seconds[first:end, device].sum() / 3 / num_microbatches for first, end, device in stages]
    message = [case.cut_seconds[end - 1] / num_microbatches for _, end, _ in stages[:-1]]
    free, end_seconds = [0.0, 0.0], 0.0
    ready = {(False, 0, microbatch): 0.0 for microbatch in range(num_microbatches)}
    while ready:
        start, _, microbatch, stage = min(
            (max(free[stages[stage][2]], at), not is_backward, microbatch, stage)
            for (is_backward, stage, microbatch), at in ready.items()
        )
        is_backward = (True, stage, microbatch) in ready
        del ready[is_backward, stage, microbatch]
        done = free[stages[stage][2]] = start + forward[stage] * (2 if is_backward else 1)
        end_seconds = max(end_seconds, done)
        if is_backward and stage > 0:
            ready[True, stage - 1, microbatch] = done + message[stage - 1]
        elif not is_backward and stage < last:
            ready[False, stage + 1, microbatch] = done + message[stage]
        elif not is_backward:
            ready[True, stage, microbatch] = done
    return end_seconds


def plans_up_to(num_stages: int, num_layers: int) -> list[Assignment]:
    """Return all plans of at most so many stages."""
    return [
        tuple((first + np.searchsorted(borders, np.arange(num_layers), side="right")) % 2)
        for count in range(num_stages)
        for borders in itertools.combinations(range(1, num_layers), count)
        for first in (0, 1)
    ]


def plans_without_search(case: Case) -> list[Assignment]:
    """Return each device alone and, for each order of devices, the cut in two whose slower stage is the fastest."""
    num_layers = len(case.seconds)
    halves = [
        min(
            ((first,) * border + (1 - first,) * (num_layers - border) for border in range(1, num_layers)),
            key=lambda plan: max(case.seconds[s:e, device].sum() for s, e, device in stages_of(plan)),
        )
        for first in (0, 1)
    ]
    return [(0,) * num_layers, (1,) * num_layers, *halves]


def run(*, seed: int = 0, num_cases: int = NUM_SEEDS) -> list[dict[str, Any]]:
    """Let each method search with and without known limits and first plans, `num_cases` seeds each."""
    figures, rows = [], []
    for model in ("alexnet", "vgg-16", "inception-v3"):
        case = load_case(model)
        measure = cache(lambda plan, case=case: step_seconds(case, plan))
        best = min(map(measure, plans_up_to(MOST_STAGES, len(case.seconds))))
        first_plans = plans_without_search(case)
        trivial = min(map(measure, first_plans)) / best - 1
        rows.append([model, "no search", f"{trivial:+.1%}", "", "", ""])
        for method, make in METHODS.items():
            gaps: dict[bool, list[float]] = {False: [], True: []}
            stages = []
            for is_helped, each in itertools.product(gaps, range(seed, seed + num_cases)):
                search = search_by_measuring(
                    make(),
                    case.problem,
                    measure,
                    budget_measurements=case.budget,
                    penalty_seconds=PENALTY_S,
                    seed=each,
                    runs_as=(lambda plan: plan if is_allowed(plan) else None) if is_helped else tuple,
                    first_plans=first_plans if is_helped else (),
                )
                gaps[is_helped].append(search.fastest(1)[0].step_seconds / best - 1)
                stages += [len(stages_of(plan.assignment)) for plan in search.plans if not is_helped]
            bare, helped = gaps[False], gaps[True]
            rows.append(
                [
                    model,
                    method,
                    f"{statistics.median(bare):+.1%} / {max(bare):+.1%}",
                    f"{statistics.median(helped):+.1%} / {max(helped):+.1%}",
                    statistics.mean(stages),
                    case.budget,
                ]
            )
            key = f"{model}_{method}".replace(" ", "_").replace("-", "_")
            for name, value in (("median", statistics.median(helped)), ("worst", max(helped))):
                figures.append(figure(f"{key}_above_best_{name}", value, "ratio", higher=False))
    table = Table(
        caption="",
        columns={
            "model": "",
            "method": "",
            "above the best, median / worst": "s",
            "with limits and first plans": "s",
            "stages of a plan": ".1f",
            "plans": "d",
        },
        rows=rows,
    )
    print("\n".join(table.lines()))
    print(f"seeds {seed} to {seed + num_cases - 1}; stages are those of plans measured without first plans")
    return figures
