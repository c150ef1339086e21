"""A plan beside its simulation: what the closed form promises, and what the pipeline reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heterps_core.planning.cost_model.evaluation import PlanEvaluation, evaluate
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.simulate.pipeline_load import PipelineLoad, pipeline_load
from heterps_core.planning.simulate.pipeline_simulation import NO_STRAGGLERS, SimulatedRun, simulate
from heterps_core.plans.scheduling_plan import Stage


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
    """Simulate a plan with and without its stragglers.

    Raises:
        ConfigurationError: The stages do not fit the problem, or the batch cannot be cut so.
    """
    load = pipeline_load(problem, stages, num_microbatches=num_microbatches)
    return PlanSimulation(
        evaluation=evaluate(problem, stages),
        load=load,
        slow_factors=slow_factors,
        undisturbed=simulate(load),
        disturbed=simulate(load, slow_factors=slow_factors) if slow_factors else None,
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
