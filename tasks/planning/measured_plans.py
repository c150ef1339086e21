"""A search whose reward is measured: the methods propose cuts of a model, and the trainer runs each of them here.

The cost model is an estimate; this asks the engine. Devices are the cores of this machine, one replica a stage, and
every method may run equally many plans with each seed, the model in one stage and the best cut in two by the profile
among them. A cut that was run once is not run again, and none that memory does not hold is run at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from heterps_core.data.dataset import PreparedDataset
from heterps_core.models.model_graph import ModelGraph, host_bytes_of_worker
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search import measured_search
from heterps_core.planning.simulate.dry_run import dry_run_problem, predict_dry_run
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.profiling.measuring_process import measure_step_seconds
from heterps_core.text_table import Table
from heterps_core.training.job import TrainingConfig, TrainingJob, default_microbatches
from heterps_core.training.node.host_memory import available_bytes
from tasks.profiling import ProfiledModel
from tasks.steps import step

PENALTY = 10.0
"""Times the step of one stage: what a plan counts that fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _MeasuredMethod:
    """What one method found with each seed."""

    method: str
    searches: tuple[measured_search.MeasuredSearch, ...]
    cuts: tuple[tuple[Stage, ...], ...]
    """The best of each search."""

    step_seconds: tuple[float, ...]
    """Step times of these cuts, each run once more: the best of many noisy measurements is too good to be true."""

    @property
    def typical(self) -> int:
        """The seed of median step time, the faster of the middle two."""
        order = sorted(range(len(self.cuts)), key=lambda seed: self.step_seconds[seed])
        return order[(len(order) - 1) // 2]


@step("search by measuring")
def search_measured(
    profiled: ProfiledModel,
    *,
    dataset: PreparedDataset,
    batch_size: int,
    methods: Sequence[str],
    budget_measurements: int,
    num_seeds: int,
    num_cores: int,
) -> tuple[_MeasuredMethod, ...]:
    """Let each method search with the same number of runs of the trainer; the fastest median step first.

    Args:
        profiled: The model, measured here.
        dataset: The prepared data set.
        batch_size: Samples of a step.
        methods: Names in `MEASURED_METHODS`.
        budget_measurements: Plans that each method may run with each seed, at least 1; each takes some seconds.
        num_seeds: Each method searches with the seeds from 0.
        num_cores: Cores of this machine, each of them a device.

    Raises:
        HeterpsError: Not even the plan of one stage runs.
    """

    def measure(cut: tuple[Stage, ...]) -> float:
        return measure_step_seconds(_job(profiled, dataset, batch_size, cut))

    num_layers = len(profiled.graph.layers)
    whole = (0,) * num_layers
    steps = {stages_of(whole): measure(stages_of(whole))}
    halves = [tuple(int(layer >= border) for layer in range(num_layers)) for border in range(1, num_layers)]
    halves.sort(key=lambda half: _predicted_seconds(profiled, stages_of(half), batch_size, num_cores))
    most_stages = _most_stages(profiled.graph, dataset.num_train_rows)

    def step_seconds(assignment: measured_search.Assignment) -> float:
        cut = stages_of(assignment)
        if cut not in steps:
            steps[cut] = measure(cut)
        return steps[cut]

    def fitting_cut(assignment: measured_search.Assignment) -> tuple[Stage, ...] | None:
        cut = stages_of(assignment)
        return cut if len(cut) <= most_stages else None

    problem = _problem_of_cores(profiled, batch_size, num_devices=max(num_cores, 2))
    searches = {
        method: tuple(
            measured_search.search_by_measuring(
                measured_search.MEASURED_METHODS[method](),
                problem,
                step_seconds,
                budget_measurements=budget_measurements,
                penalty_seconds=PENALTY * steps[stages_of(whole)],
                seed=seed,
                runs_as=fitting_cut,
                first_plans=[whole, *halves[:1]],
            )
            for seed in range(num_seeds)
        )
        for method in methods
    }
    cuts = {
        method: tuple(stages_of(search.fastest(1)[0].assignment) for search in found)
        for method, found in searches.items()
    }
    again = {cut: measure(cut) for cut in dict.fromkeys(cut for found in cuts.values() for cut in found)}
    found = [
        _MeasuredMethod(
            method=method,
            searches=searches[method],
            cuts=cuts[method],
            step_seconds=tuple(again[cut] for cut in cuts[method]),
        )
        for method in methods
    ]
    return tuple(sorted(found, key=lambda each: each.step_seconds[each.typical]))


def _predicted_seconds(
    profiled: ProfiledModel, cut: tuple[Stage, ...], batch_size: int, num_cores: int
) -> float:
    """Return the step of a cut by the profile of the layers."""
    return predict_dry_run(
        profiled.graph,
        profiled.local_profile,
        cut,
        batch_size=batch_size,
        num_microbatches=default_microbatches(batch_size, num_stages=len(cut)),
        num_cores=num_cores,
    ).step_seconds


def _most_stages(graph: ModelGraph, num_train_rows: int) -> float:
    """Return how many workers the free memory holds beside the model's state, gradients included; at least one."""
    state_bytes = sum(
        layer.state_bytes + (0 if layer.is_sharded else layer.parameter_bytes) for layer in graph.layers
    )
    free_bytes = available_bytes()
    if free_bytes is None:
        return math.inf
    return max(1, (free_bytes - state_bytes) // host_bytes_of_worker(num_train_rows))


def stages_of(assignment: measured_search.Assignment) -> tuple[Stage, ...]:
    """Return the cut that an assignment of layers to cores makes: equal neighbours share a stage.

    Example:
        >>> [(stage.first_layer, stage.last_layer) for stage in stages_of((0, 0, 1, 0))]
        [(0, 1), (2, 2), (3, 3)]
    """
    firsts = [at for at, core in enumerate(assignment) if at == 0 or core != assignment[at - 1]]
    lasts = [*(first - 1 for first in firsts[1:]), len(assignment) - 1]
    return tuple(
        Stage(first, last, f"core-{number % 2}", 1)
        for number, (first, last) in enumerate(zip(firsts, lasts, strict=True))
    )


def measured_table(model: str, found: Sequence[_MeasuredMethod], *, batch_size: int) -> Table:
    """Return what each method found, for people."""
    num_seeds = len(found[0].cuts)
    return Table(
        caption=f"Measured steps of {model}, a batch of {batch_size}, {num_seeds} seed{'s' * (num_seeds > 1)}",
        columns={
            "method": "",
            "median step ms": ".2f",
            "worst": ".2f",
            "samples/s": ",.0f",
            "cut of the median": "",
            "plans run": "d",
            "refused": "d",
        },
        rows=[
            [
                each.method,
                1e3 * each.step_seconds[each.typical],
                1e3 * max(each.step_seconds),
                batch_size / each.step_seconds[each.typical],
                " | ".join(f"{stage.first_layer}..{stage.last_layer}" for stage in each.cuts[each.typical]),
                len(each.searches[each.typical].plans),
                sum(search.num_refused for search in each.searches),
            ]
            for each in found
        ],
    )


def _job(
    profiled: ProfiledModel, dataset: PreparedDataset, batch_size: int, stages: tuple[Stage, ...]
) -> TrainingJob:
    return TrainingJob(
        run_id="measuring",
        model=profiled.graph.name,
        dataset=str(dataset.directory),
        stages=stages,
        config=TrainingConfig(
            batch_size=batch_size,
            num_microbatches=default_microbatches(batch_size, num_stages=len(stages)),
            num_epochs=1,
            seed=0,
        ),
    )


def _problem_of_cores(profiled: ProfiledModel, batch_size: int, *, num_devices: int) -> SchedulingProblem:
    """Return the problem of placing layers on equal cores, from whose times no method learns anything."""
    whole = stages_of((0,) * len(profiled.graph.layers))
    problem, (stage,) = dry_run_problem(
        profiled.graph, profiled.local_profile, whole, batch_size=batch_size, num_microbatches=1
    )
    names = [f"core-{number}" for number in range(num_devices)]

    def for_all(values: Mapping[str, float]) -> dict[str, float]:
        return dict.fromkeys(names, values[stage.device_type])

    return replace(
        problem,
        layers=tuple(
            replace(
                layer,
                compute_seconds=for_all(layer.compute_seconds),
                communication_seconds=for_all(layer.communication_seconds),
            )
            for layer in problem.layers
        ),
        device_types=dict.fromkeys(names, problem.device_types[stage.device_type]),
    )
