"""A search whose reward is measured: the methods propose cuts of a model, and the trainer runs each of them here.

The cost model is an estimate; this asks the engine. Devices are the cores of this machine, one replica a stage, and
every method may run equally many plans. A cut that one method had run is not run again for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prefect import task
from prefect.cache_policies import NO_CACHE

from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.measured_search import (
    MEASURED_METHODS,
    Assignment,
    MeasuredSearch,
    search_by_measuring,
)
from heterps_core.planning.simulate.dry_run import dry_run_problem, predict_dry_run
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.profiling.measuring_process import measure_worker_costs
from heterps_core.text_table import Table
from heterps_core.training.job import TrainingConfig, TrainingJob, default_microbatches
from tasks.profiling import ProfiledModel

PENALTY = 10.0
"""Times the step of one stage: what a plan counts that fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredMethod:
    """What one method found."""

    method: str
    search: MeasuredSearch
    stages: tuple[Stage, ...]
    """Of its best plan."""

    step_seconds: float
    """Of that plan, run once more: the best of many noisy measurements is too good to be true."""

    predicted_step_seconds: float
    """By the closed form."""


@task(name="search by measuring", cache_policy=NO_CACHE)
def search_measured(
    profiled: ProfiledModel,
    *,
    dataset: str,
    batch_size: int,
    methods: Sequence[str],
    budget_measurements: int,
    seed: int,
    num_cores: int,
) -> tuple[MeasuredMethod, ...]:
    """Let each method search with the same number of runs of the trainer; the fastest step first.

    Args:
        profiled: The model, measured here.
        dataset: Folder of the prepared data set.
        batch_size: Samples of a step.
        methods: Names in `MEASURED_METHODS`.
        budget_measurements: Plans that each method may run, at least 1; each takes some seconds.
        seed: Of the methods.
        num_cores: Cores of this machine, each of them a device.

    Raises:
        HeterpsError: Not even the plan of one stage runs.
    """
    steps: dict[tuple[Stage, ...], float] = {}

    def measure_cut(stages: tuple[Stage, ...]) -> float:
        if stages not in steps:
            steps[stages] = measure_worker_costs(_job(profiled, dataset, batch_size, stages)).step_seconds
        return steps[stages]

    num_layers = len(profiled.graph.layers)
    whole = measure_cut(stages_of((0,) * num_layers))
    problem = _problem_of_cores(profiled, batch_size, num_devices=max(num_cores, 2))
    found = []
    for method in methods:
        search = search_by_measuring(
            MEASURED_METHODS[method](),
            problem,
            lambda assignment: measure_cut(stages_of(assignment)),
            budget_measurements=budget_measurements,
            penalty_seconds=PENALTY * whole,
            seed=seed,
        )
        best = search.fastest(1)
        stages = stages_of(best[0].assignment) if best else stages_of((0,) * num_layers)
        del steps[stages]
        found.append(
            MeasuredMethod(
                method=method,
                search=search,
                stages=stages,
                step_seconds=measure_cut(stages),
                predicted_step_seconds=predict_dry_run(
                    profiled.graph,
                    profiled.local_profile,
                    stages,
                    batch_size=batch_size,
                    num_microbatches=default_microbatches(batch_size, num_stages=len(stages)),
                    num_cores=num_cores,
                ).step_seconds,
            )
        )
    return tuple(sorted(found, key=lambda each: each.step_seconds))


def stages_of(assignment: Assignment) -> tuple[Stage, ...]:
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


def measured_table(model: str, found: Sequence[MeasuredMethod], *, batch_size: int) -> Table:
    """Return what each method found, for people."""
    return Table(
        caption=f"Measured steps of {model}, a batch of {batch_size}",
        columns={
            "method": "",
            "best cut": "",
            "plans run": "d",
            "seconds": ".0f",
            "step ms": ".2f",
            "samples/s": ",.0f",
            "closed form ms": ".2f",
        },
        rows=[
            [
                each.method,
                " | ".join(f"{stage.first_layer}..{stage.last_layer}" for stage in each.stages),
                len(each.search.plans),
                each.search.search_seconds,
                1e3 * each.step_seconds,
                batch_size / each.step_seconds,
                1e3 * each.predicted_step_seconds,
            ]
            for each in found
        ],
    )


def _job(profiled: ProfiledModel, dataset: str, batch_size: int, stages: tuple[Stage, ...]) -> TrainingJob:
    return TrainingJob(
        run_id="measuring",
        model=profiled.graph.name,
        dataset=dataset,
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
