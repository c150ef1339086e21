"""A plan beside its simulation: what the closed form promises, what the pipeline reaches, and what limits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from heterps_core.planning.cost_model.evaluation import PlanEvaluation, evaluate
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.simulate.pipeline_load import PipelineLoad, pipeline_load
from heterps_core.planning.simulate.pipeline_simulation import NO_STRAGGLERS, SimulatedRun, simulate
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import LEAST_MICROBATCH_ROWS

LEAST_LIMITING_SHARE = 0.1
"""Of the time of the stage that waits least for data: less waiting than this leaves computing as the limit."""

_MORE_MICROBATCHES = (4, 2)
"""Times as many, the first that the trainer takes."""


class Limit(StrEnum):
    """What a plan spends the time of the stage that waits least for data on."""

    STRAGGLERS = "stragglers"
    """Without them the plan is faster by more than `LEAST_LIMITING_SHARE` of its time."""

    COMPUTING = "computing"
    FILLING = "filling and draining"
    """The first and the last micro-batches of a step find stages without work."""

    LINK = "link"
    BARRIER = "barrier"


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitingStage:
    """The stage that waits least for the others, and what its time goes to."""

    limit: Limit
    stage: int
    share: float
    """Of the stage's time; with stragglers, of the time of a step that they add."""

    relieved_samples_per_s: float | None
    """Simulated without this limit, or with less of it; None where nothing was tried."""

    relieved_microbatches: int | None = None
    """For `FILLING`: with how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSimulation:
    """A plan, its closed form, and its simulated runs."""

    evaluation: PlanEvaluation
    load: PipelineLoad
    slow_factors: Mapping[tuple[int, int], float]
    """Stage and replica of stragglers -> how many times as long their passes take."""

    undisturbed: SimulatedRun
    """Without stragglers."""

    disturbed: SimulatedRun | None
    """With stragglers; None where there are none."""

    limiting: LimitingStage

    @property
    def run(self) -> SimulatedRun:
        """With all that was asked for."""
        return self.undisturbed if self.disturbed is None else self.disturbed


def simulate_plan(
    problem: SchedulingProblem,
    stages: Sequence[Stage],
    *,
    num_microbatches: int,
    slow_factors: Mapping[tuple[int, int], float] = NO_STRAGGLERS,
) -> PlanSimulation:
    """Simulate a plan with and without its stragglers, and find what limits it.

    Raises:
        ConfigurationError: The stages do not fit the problem, or the batch cannot be cut so.
    """
    evaluation = evaluate(problem, stages)
    load = pipeline_load(problem, stages, num_microbatches=num_microbatches)
    undisturbed = simulate(load)
    disturbed = simulate(load, slow_factors=slow_factors) if slow_factors else None
    limiting = _limiting_stage(problem, stages, load, undisturbed)
    if disturbed is not None:
        lost_share = 1 - undisturbed.step_seconds / disturbed.step_seconds
        if lost_share >= LEAST_LIMITING_SHARE:
            limiting = LimitingStage(
                limit=Limit.STRAGGLERS,
                stage=_least_waiting(disturbed),
                share=lost_share,
                relieved_samples_per_s=undisturbed.throughput_samples_per_s,
            )
    return PlanSimulation(
        evaluation=evaluation,
        load=load,
        slow_factors=slow_factors,
        undisturbed=undisturbed,
        disturbed=disturbed,
        limiting=limiting,
    )


def run_cost_usd(problem: SchedulingProblem, evaluation: PlanEvaluation, *, step_seconds: float) -> float:
    """Return the bill of all epochs where a step takes this long, by the planner's objective.

    Compute, whole instances, storage and what interruptions lose grow with the time; start-up, transfers and the
    search do not. With the closed form's step it is `evaluation.cost_usd`.
    """
    objective = objective_of(problem)
    rates = dict(zip(problem.device_types, objective.interruptions_per_hour.tolist(), strict=True))
    [transfer_usd] = [
        line.cost_usd for line in evaluation.cost_lines if line.name == "transfer between zones"
    ]
    product = objective.product(
        step_seconds,
        evaluation.price_usd_per_hour,
        sum(rates[part.stage.device_type] * part.stage.num_replicas for part in evaluation.stages),
        transfer_usd / objective.usd_per_product,
    )
    return float(objective.cost_usd(product))


def _least_waiting(run: SimulatedRun) -> int:
    return min(range(len(run.stages)), key=lambda index: run.stages[index].waiting_for_data)


def _limiting_stage(
    problem: SchedulingProblem, stages: Sequence[Stage], load: PipelineLoad, run: SimulatedRun
) -> LimitingStage:
    stage = _least_waiting(run)
    use = run.stages[stage]
    share, limit = max(
        (use.waiting_for_data, Limit.FILLING),
        (use.waiting_for_link, Limit.LINK),
        (use.waiting_at_barrier, Limit.BARRIER),
    )
    if share < LEAST_LIMITING_SHARE:
        return LimitingStage(
            limit=Limit.COMPUTING, stage=stage, share=use.computing, relieved_samples_per_s=None
        )
    num_microbatches = _more_microbatches(load) if limit is Limit.FILLING else None
    relieved: SimulatedRun | None = None
    if num_microbatches is not None:
        relieved = simulate(pipeline_load(problem, stages, num_microbatches=num_microbatches))
    elif limit is Limit.LINK:
        relieved = simulate(_without_links(load))
    return LimitingStage(
        limit=limit,
        stage=stage,
        share=share,
        relieved_samples_per_s=None if relieved is None else relieved.throughput_samples_per_s,
        relieved_microbatches=num_microbatches,
    )


def _more_microbatches(load: PipelineLoad) -> int | None:
    """Return a larger number that the trainer takes: an even cut, enough rows, and one for each replica."""
    least_rows = max(LEAST_MICROBATCH_ROWS, *(stage.num_replicas for stage in load.stages))
    for factor in _MORE_MICROBATCHES:
        count = factor * load.num_microbatches
        if load.batch_size % count == 0 and load.batch_size // count >= least_rows:
            return count
    return None


def _without_links(load: PipelineLoad) -> PipelineLoad:
    return replace(
        load,
        stages=tuple(
            replace(
                stage, input_seconds=0.0, output_seconds=0.0, exchange_seconds=0.0, all_reduce_seconds=0.0
            )
            for stage in load.stages
        ),
    )
