"""TAPP with real runs: plans of the three image classifiers, each rewarded by its measured step time.

Two devices of unlike speed (`unlike_devices.py`) train real steps on the engine. TAPP and REINFORCE see measured step
times only; Pipe-Torch and this project's planner see profiles of the layers; data-parallel training (BSP) and the
single device need neither. At the end all chosen plans run in turns, and each figure is the median of the rounds.
A device holds a few stages of a plan at most; plans with more fail and count as `PENALTY_S`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from heterps_core.measurement.placed_plan import MeasuredModel, PlacedStage, stages_of_assignment
from heterps_core.measurement.plan_measurer import PlanMeasurer, StepMeasurement
from heterps_core.models.image_chain import IMAGE_SHAPE
from heterps_core.planning.search.measured_search import Assignment, MeasuredSearch, search_by_measuring
from heterps_core.planning.search.pipe_torch import balanced_cut
from heterps_core.planning.search.schedulers.base import ProposingScheduler
from heterps_core.planning.search.schedulers.policy_gradient import one_torch_thread
from heterps_core.planning.search.schedulers.reinforce import ReinforceScheduler, ReinforceSettings
from heterps_core.planning.search.schedulers.tapp import TappScheduler, TappSettings, root_cost_rewards
from heterps_core.text_table import aligned
from tests.benchmarks.unlike_devices import (
    cut_seconds,
    layer_seconds,
    planned_assignment,
    profiled_problem,
    unlike_devices,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model at a size that fits."""

    batch_size: int
    num_microbatches: int
    """Of plans with several stages."""

    budget_measurements: int
    """Plans that each search may try; as many as some 90 s allow on two cores."""

    published: dict[str, float]
    """Step time of each baseline over TAPP's, from table values of Mao et al. 2021."""


CASES = {
    "alexnet": Case(
        batch_size=128,
        num_microbatches=4,
        budget_measurements=48,
        published={"single": 0.811 / 0.602, "bsp": 0.803 / 0.602, "pipe-torch": 0.675 / 0.602},
    ),
    "vgg-16": Case(
        batch_size=32,
        num_microbatches=2,
        budget_measurements=28,
        published={"single": 1.972 / 1.432, "bsp": 1.865 / 1.432, "pipe-torch": 1.634 / 1.432},
    ),
    "inception-v3": Case(
        batch_size=64,
        num_microbatches=4,
        budget_measurements=20,
        published={"single": 0.985 / 0.614, "bsp": 0.914 / 0.614, "pipe-torch": 0.632 / 0.614},
    ),
}

NUM_ROUNDS = 5
STEPS_IN_SEARCH = 1
"""Steps of a plan that are timed in a search, behind one that warms up."""

CANDIDATES = 3
"""Fastest plans of a search that run once more before one is chosen."""

PROCESSES_PER_DEVICE = 5
PENALTY_S = 10.0
"""Several times the slowest plan that runs."""

TAPP_SETTINGS = TappSettings(most_groups=8, groupings_per_round=2, placements_per_grouping=2)
"""Small rounds: dozens of plans are measured, not thousands."""

REINFORCE_SETTINGS = ReinforceSettings(plans_per_round=8, elite_fraction=0.15)


def run(*, seed: int = 0) -> list[dict[str, Any]]:
    """Measure all models, print their tables and return the figures in the form of the benchmark contract."""
    figures = [figure for model in CASES for figure in run_model(model, seed=seed)]
    for baseline in ("bsp", "pipe-torch", "single"):
        ratios = [entry["value"] for entry in figures if entry["name"].endswith(f"_{baseline}_over_tapp")]
        figures.append(ratio_figure(f"mean_{baseline}_over_tapp", statistics.mean(ratios)))
    print(
        f"medians of {NUM_ROUNDS} rounds in turns, seed {seed}, {os.cpu_count()} cores, "
        f"load average {os.getloadavg()[0]:.1f}"
    )
    return figures


def run_model(model: str, *, seed: int) -> list[dict[str, Any]]:
    """Search, measure and print one model; return its figures."""
    case, devices = CASES[model], unlike_devices()
    started_s = time.perf_counter()
    problem = profiled_problem(
        model, devices, batch_size=case.batch_size, num_microbatches=case.num_microbatches, seed=seed
    )
    names, num_blocks = list(devices), problem.num_layers
    measured_model = MeasuredModel(
        builder="heterps_core.models.image_blocks:build_image_blocks",
        arguments={"model": model, "seed": seed},
        input_shape=IMAGE_SHAPE,
    )
    searches: dict[str, ProposingScheduler] = {
        "tapp": TappScheduler(TAPP_SETTINGS, rewards=root_cost_rewards),
        "reinforce": ReinforceScheduler(REINFORCE_SETTINGS),
    }
    with (
        one_torch_thread(),
        PlanMeasurer(
            measured_model,
            devices,
            batch_size=case.batch_size,
            num_microbatches=case.num_microbatches,
            processes_per_device=PROCESSES_PER_DEVICE,
        ) as measurer,
    ):

        def step_seconds(assignment: Assignment) -> float:
            stages = stages_of_assignment(assignment, names)
            return measurer.measure(stages, num_steps=STEPS_IN_SEARCH).step_seconds

        def whole(*on: str, row_shares: tuple[float, ...] | None = None) -> tuple[PlacedStage, ...]:
            return (PlacedStage(first_block=0, last_block=num_blocks - 1, devices=on, row_shares=row_shares),)

        alone_s = {name: measurer.measure(whole(name), num_steps=2).step_seconds for name in names}
        speeds = np.array([1 / alone_s[name] for name in names])
        fast_share = float(speeds[0] / speeds.sum())
        seconds_LD, cuts = layer_seconds(problem), cut_seconds(problem)
        plans = {
            "single": whole(min(alone_s, key=lambda name: alone_s[name])),
            "bsp": whole(*names),
            "bsp by speed": whole(*names, row_shares=(fast_share, 1 - fast_share)),
            "pipe-torch": stages_of_assignment(balanced_cut(seconds_LD, cuts).assignment, names),
            "planner": stages_of_assignment(planned_assignment(problem), names),
        }
        found: dict[str, MeasuredSearch] = {}
        for name, scheduler in searches.items():
            found[name] = search_by_measuring(
                scheduler,
                problem,
                step_seconds,
                budget_measurements=case.budget_measurements,
                penalty_seconds=PENALTY_S,
                seed=seed,
            )
            candidates = [plan.assignment for plan in found[name].fastest(CANDIDATES)]
            plans[name] = stages_of_assignment(min(candidates, key=step_seconds), names)
        rounds = measure_in_turns(measurer, plans)
    print(
        f"{model}: {num_blocks} blocks, batch {case.batch_size}, {case.num_microbatches} micro-batches in "
        f"pipelines; alone the slow device takes {alone_s['slow'] / alone_s['fast']:.2f} times as long, its blocks "
        f"{describe_range(seconds_LD[:, 1] / seconds_LD[:, 0])} times; {time.perf_counter() - started_s:.0f} s in all"
    )
    for name, search in found.items():
        failed = sum(plan.has_failed for plan in search.plans)
        print(
            f"  {name}: {len(search.plans)} plans tried ({failed} failed) of {search.num_proposed} drawn in "
            f"{search.search_seconds:.0f} s"
        )
    return report(model, case, plans, rounds)


def measure_in_turns(
    measurer: PlanMeasurer, plans: dict[str, tuple[PlacedStage, ...]]
) -> dict[str, list[StepMeasurement]]:
    """Measure every distinct plan once in each round; ways that chose the same plan share its figures."""
    distinct = list(dict.fromkeys(plans.values()))
    rounds = [
        {stages: measurer.measure(stages, num_steps=STEPS_IN_SEARCH) for stages in distinct}
        for _ in range(NUM_ROUNDS)
    ]
    return {name: [measured[stages] for measured in rounds] for name, stages in plans.items()}


def report(
    model: str,
    case: Case,
    plans: dict[str, tuple[PlacedStage, ...]],
    rounds: dict[str, list[StepMeasurement]],
) -> list[dict[str, Any]]:
    """Print one row per way and return the figures; ratios are medians of those within a round."""
    rows, figures = [], []
    for name, measured in rounds.items():
        seconds = statistics.median(entry.step_seconds for entry in measured)
        share = statistics.median(entry.communication_share for entry in measured)
        ratio = statistics.median(
            own.step_seconds / tapp.step_seconds for own, tapp in zip(measured, rounds["tapp"], strict=True)
        )
        published = f"{case.published[name]:.2f}" if name in case.published else ""
        rows.append([name, f"{seconds:.3f}", f"{share:.2f}", f"{ratio:.2f}", published, shown(plans[name])])
        key = f"{model}_{name.replace(' ', '_')}"
        figures += [
            {"name": f"{key}_step_seconds", "value": seconds, "unit": "s", "higher_is_better": False},
            {
                "name": f"{key}_communication_share",
                "value": share,
                "unit": "ratio",
                "higher_is_better": False,
            },
        ]
        if name != "tapp":
            figures.append(ratio_figure(f"{key}_over_tapp", ratio))
    headings = ["way", "s a step", "communication", "over tapp", "paper", "plan"]
    print("\n".join(f"  {line}" for line in aligned([headings, *rows], words=[0, 5])))
    return figures


def ratio_figure(name: str, value: float) -> dict[str, Any]:
    """Return how many times as long as TAPP's a step takes, in the form of the benchmark contract."""
    return {"name": name, "value": round(value, 4), "unit": "ratio", "higher_is_better": True}


def shown(stages: Sequence[PlacedStage]) -> str:
    """Return a plan in short, for instance "fast 0-5 | slow 6-7"."""
    return " | ".join(f"{'+'.join(stage.devices)} {stage.first_block}-{stage.last_block}" for stage in stages)


def describe_range(values: Sequence[float]) -> str:
    """Return the least and the largest of some values."""
    return f"{min(values):.2f} to {max(values):.2f}"
