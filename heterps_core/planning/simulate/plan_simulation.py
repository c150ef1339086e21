"""A plan beside its simulation: what the closed form promises, and what the pipeline reaches; as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from heterps_core.planning.cost_model.evaluation import PlanEvaluation, evaluate
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.cost_model.stage_cost import is_within
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from heterps_core.planning.simulate.pipeline_load import PipelineLoad, pipeline_load
from heterps_core.planning.simulate.pipeline_simulation import SimulatedRun, simulate
from heterps_core.plans.scheduling_plan import SchedulingPlan, Stage
from heterps_core.text_table import WIDTH, Table, labelled_lines
from heterps_core.training.job import default_microbatches, delayed_microbatches
from heterps_core.units import MS_PER_S, SECONDS_PER_HOUR

SCHEMA_VERSION = 1

LEAST_SHOWN_DEVIATION = 1e-3
"""Relative, between the throughput that the plan file promises and that of the problem."""

_FIXED_COSTS = (
    "start-up and teardown",
    "transfer between regions",
    "search and profiling",
)
"""Cost lines that a longer run does not raise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSimulation:
    """A plan, its closed form, and its simulated runs."""

    evaluation: PlanEvaluation
    load: PipelineLoad
    run: SimulatedRun


def simulate_plan(
    problem: SchedulingProblem,
    stages: Sequence[Stage],
    *,
    num_microbatches: int | None = None,
) -> PlanSimulation:
    """Simulate a plan; by default with the trainer's number of micro-batches.

    Raises:
        ConfigurationError: The stages do not fit the problem, or the batch cannot be cut so.
    """
    if num_microbatches is None:
        drains = problem.drains or problem.step_model is StepModel.PAPERS
        microbatches = default_microbatches if drains else delayed_microbatches
        num_microbatches = microbatches(problem.batch_size, num_stages=len(stages))
    evaluation = evaluate(problem, stages)
    load = pipeline_load(problem, stages, num_microbatches=num_microbatches)
    return PlanSimulation(evaluation=evaluation, load=load, run=simulate(load))


def run_cost_usd(problem: SchedulingProblem, evaluation: PlanEvaluation, *, step_seconds: float) -> float:
    """Return the bill of all epochs where a step takes this long, by the planner's objective.

    Compute, whole instances, storage and what interruptions lose grow with the time; start-up and the search do
    not. With the closed form's step it is `evaluation.cost_usd`.
    """
    objective = objective_of(problem)
    rates = dict(zip(problem.device_types, objective.interruptions_per_hour.tolist(), strict=True))
    product = objective.product(
        step_seconds,
        evaluation.price_usd_per_hour,
        sum(
            rates[name] * number
            for part in evaluation.stages
            for name, number in part.stage.replicas_by_type.items()
        ),
        evaluation.start_seconds / (objective.usd_per_product * SECONDS_PER_HOUR),
    )
    return float(objective.cost_usd(product))


def simulation_text(problem: SchedulingProblem, plan: SchedulingPlan, simulation: PlanSimulation) -> str:
    """Return a simulation for a terminal of 100 columns."""
    return "\n".join(
        [
            *textwrap.wrap(_heading(problem, plan, simulation), WIDTH),
            "",
            *_speed_table(problem, simulation).lines(indent=""),
            "",
            *_stage_table(simulation).lines(indent=""),
            "",
            *labelled_lines(_remarks(problem, plan, simulation), indent=""),
        ]
    )


def simulation_to_json(
    problem: SchedulingProblem, plan: SchedulingPlan, simulation: PlanSimulation
) -> dict[str, Any]:
    """Return all figures as plain JSON values; shares lie in [0, 1]."""
    run = simulation.run
    return {
        "schema_version": SCHEMA_VERSION,
        "model": problem.model,
        "batch_size": problem.batch_size,
        "num_microbatches": simulation.load.num_microbatches,
        "step_seconds": run.step_seconds,
        "samples_per_s": run.throughput_samples_per_s,
        "cost_usd": run_cost_usd(problem, simulation.evaluation, step_seconds=run.step_seconds),
        "promised_cost_usd": plan.cost_usd,
        **{
            label: {
                "throughput_samples_per_s": problem.batch_size / step_seconds,
                "step_seconds": step_seconds,
                "run_seconds": problem.run_seconds(step_seconds),
                "cost_usd": run_cost_usd(problem, simulation.evaluation, step_seconds=step_seconds),
            }
            for label, step_seconds in _step_seconds(problem, simulation)
        },
        "stages": [
            {**part.stage.to_json(), **asdict(use)}
            for part, use in zip(simulation.evaluation.stages, simulation.run.stages, strict=True)
        ],
    }


def _heading(problem: SchedulingProblem, plan: SchedulingPlan, simulation: PlanSimulation) -> str:
    count = simulation.load.num_microbatches
    rows = problem.batch_size / count
    size = f"{rows:,.0f}" if rows == int(rows) else f"about {rows:,.0f}"
    return (
        f"Plan for {problem.model} by {plan.scheduler}, simulated: steps of {problem.batch_size:,.0f} rows in "
        f"{count:,} micro-batch{'' if count == 1 else 'es'} of {size} rows"
    )


def _step_seconds(problem: SchedulingProblem, simulation: PlanSimulation) -> list[tuple[str, float]]:
    planned = problem.batch_size / simulation.evaluation.throughput_samples_per_s
    return [("planned", planned), ("simulated", simulation.run.step_seconds)]


def _speed_table(problem: SchedulingProblem, simulation: PlanSimulation) -> Table:
    planned = simulation.evaluation.throughput_samples_per_s
    return Table(
        columns={
            "": "",
            "samples/s": ",.1f",
            "to planned": "s",
            "step ms": ",.3f",
            "hours": ",.3f",
            "USD": ",.6f",
        },
        rows=[
            (
                label,
                problem.batch_size / step_seconds,
                ""
                if label == "planned"
                else f"{100 * (problem.batch_size / step_seconds / planned - 1):+.1f} %",
                step_seconds * MS_PER_S,
                problem.run_seconds(step_seconds) / SECONDS_PER_HOUR,
                run_cost_usd(problem, simulation.evaluation, step_seconds=step_seconds),
            )
            for label, step_seconds in _step_seconds(problem, simulation)
        ],
    )


def _stage_table(simulation: PlanSimulation) -> Table:
    shares = dict.fromkeys(("computing", "waits: for data", "link", "barrier"), "s")
    words = {"layers": "", "device type": ""}
    return Table(
        columns={"stage": "d", **words, "replicas": "d", **shares},
        rows=[
            (
                index,
                f"{part.stage.first_layer}..{part.stage.last_layer}",
                part.stage.units if part.stage.second_device_type else part.stage.device_type,
                part.stage.num_replicas,
                *map(_percent, astuple(use)),
            )
            for index, (part, use) in enumerate(
                zip(simulation.evaluation.stages, simulation.run.stages, strict=True)
            )
        ],
    )


def _remarks(
    problem: SchedulingProblem, plan: SchedulingPlan, simulation: PlanSimulation
) -> Iterator[tuple[str, str]]:
    """Yield labels and sentences."""
    floor = problem.throughput_floor_samples_per_s
    if floor:
        step_seconds = simulation.run.step_seconds
        verdict = "kept"
        if not is_within(step_seconds, problem.stage_seconds_limit):
            verdict = f"missed by {_percent(1 - problem.stage_seconds_limit / step_seconds)}"
        yield "floor", f"{floor:,.1f} samples/s: {verdict} in simulation"
    yield "cost", _cost_text(simulation)
    here = simulation.evaluation.throughput_samples_per_s
    if abs(plan.throughput_samples_per_s / here - 1) > LEAST_SHOWN_DEVIATION:
        yield (
            "note",
            f"the plan file promises {plan.throughput_samples_per_s:,.1f} samples/s: it was made for a problem "
            f"with other times than this one",
        )


def _cost_text(simulation: PlanSimulation) -> str:
    lines = [line.name for line in simulation.evaluation.cost_lines if line.cost_usd != 0]
    fixed = [name for name in lines if name in _FIXED_COSTS]
    growing = [name for name in lines if name not in _FIXED_COSTS]
    stay = f"; {', '.join(fixed)} {'does' if len(fixed) == 1 else 'do'} not" if fixed else ""
    grow = "grows" if len(growing) == 1 else "grow"
    price = simulation.evaluation.price_usd_per_hour
    return f"{price:,.4f} USD/hour; {', '.join(growing)} {grow} with the hours{stay}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
