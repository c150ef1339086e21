"""Why the plan is as it is: what each device type is good for, what sets the pace, what one type alone would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.cost_model.evaluation import PlanEvaluation, StageEvaluation, evaluate
from heterps_core.planning.cost_model.stage_cost import is_within, replica_memory_bytes
from heterps_core.planning.explain.variants import cheapest_plan, without_type
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.provisioning.replica_balance import LayerRun, balance_replicas
from heterps_core.plans.scheduling_plan import Stage

Limit = Literal["computation", "communication"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeRole:
    """What a device type does in the plan."""

    device_type: str
    runs: tuple[tuple[int, int], ...]
    """First and last layer of each stage on it."""

    num_units: int
    state_bytes: float
    """Of its layers, each counted once."""

    price_share: float
    """Of the plan's USD/hour."""

    next_type: str
    """The device type on which the same layers' work costs least otherwise; empty where there is no other."""

    next_cost_ratio: float
    """What that work costs on `next_type` over what it costs here, at the price of a unit; memory,
    boundaries and replicas are left aside. 0 where it costs nothing here."""

    next_time_ratio: float
    """How long one unit of `next_type` takes for that work over how long one takes here; 0 likewise."""

    num_memory_bound_stages: int
    """Stages that could not do with one replica less, because their layers would not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeWorth:
    """What a device type of the plan saves."""

    device_type: str
    extra_usd_without: float | None
    """What the cheapest plan without this type costs more; None where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The slowest stage, which sets the throughput."""

    stage: Stage
    limit: Limit
    seconds: float
    """For one batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleType:
    """Every layer on one device type."""

    device_type: str
    cost_usd: float | None
    """None where it breaks a constraint."""

    broken_constraint: str
    """Which one; empty where there is a plan."""


def find_roles(problem: SchedulingProblem, evaluation: PlanEvaluation) -> tuple[TypeRole, ...]:
    """Return what each device type of a plan does, in the order of the chain."""
    parts: dict[str, list[StageEvaluation]] = {}
    for part in evaluation.stages:
        parts.setdefault(part.stage.device_type, []).append(part)
    return tuple(_role(problem, evaluation, name, mine) for name, mine in parts.items())


def find_worths(
    problem: SchedulingProblem, stages: Sequence[Stage], cost_usd: float
) -> tuple[TypeWorth, ...]:
    """Return what each device type of the cheapest plan saves; one search for each."""
    worths = []
    for name in dict.fromkeys(stage.device_type for stage in stages):
        found = cheapest_plan(without_type(problem, name)) if len(problem.device_types) > 1 else None
        extra_usd = None if found is None else found.cost_usd - cost_usd
        worths.append(TypeWorth(device_type=name, extra_usd_without=extra_usd))
    return tuple(worths)


def find_pace(evaluation: PlanEvaluation) -> Pace:
    """Return the stage that sets the throughput, and whether it computes or communicates the longer."""
    slowest = evaluation.bottleneck
    is_computing = slowest.compute_seconds >= slowest.communication_seconds
    return Pace(
        stage=slowest.stage,
        limit="computation" if is_computing else "communication",
        seconds=slowest.seconds,
    )


def find_single_types(problem: SchedulingProblem) -> tuple[SingleType, ...]:
    """Return what every layer on one device type would cost, for each type; the cheapest first."""
    singles = [_single_type(problem, name) for name in problem.device_types]
    return tuple(sorted(singles, key=lambda single: (single.cost_usd is None, single.cost_usd or 0.0)))


def _role(
    problem: SchedulingProblem, evaluation: PlanEvaluation, name: str, parts: Sequence[StageEvaluation]
) -> TypeRole:
    layers = [index for part in parts for index in range(part.stage.first_layer, part.stage.last_layer + 1)]
    seconds = {other: _work_seconds(problem, layers, other) for other in problem.device_types}
    work_usd = {
        other: seconds[other] * unit.price_usd_per_hour for other, unit in problem.device_types.items()
    }
    next_type = min((other for other in work_usd if other != name), key=work_usd.__getitem__, default="")
    is_comparable = next_type != "" and seconds[name] > 0
    return TypeRole(
        device_type=name,
        runs=tuple((part.stage.first_layer, part.stage.last_layer) for part in parts),
        num_units=sum(part.stage.num_replicas for part in parts),
        state_bytes=sum(problem.layers[index].state_bytes for index in layers),
        price_share=sum(part.price_usd_per_hour for part in parts) / evaluation.price_usd_per_hour,
        next_type=next_type,
        next_cost_ratio=work_usd[next_type] / work_usd[name] if is_comparable else 0.0,
        next_time_ratio=seconds[next_type] / seconds[name] if is_comparable else 0.0,
        num_memory_bound_stages=sum(_is_memory_bound(problem, part.stage) for part in parts),
    )


def _work_seconds(problem: SchedulingProblem, layers: Sequence[int], device_type: str) -> float:
    """Return how long one unit computes and communicates for some layers, one after the other."""
    return sum(
        max(
            problem.layers[index].compute_seconds[device_type],
            problem.layers[index].communication_seconds[device_type],
        )
        for index in layers
    )


def _is_memory_bound(problem: SchedulingProblem, stage: Stage) -> bool:
    if stage.num_replicas == 1:
        return False
    layers = problem.layers[stage.first_layer : stage.last_layer + 1]
    replicated_bytes = sum(layer.state_bytes for layer in layers if not layer.is_sharded)
    sharded_bytes = sum(layer.state_bytes for layer in layers if layer.is_sharded)
    fewer_bytes = replica_memory_bytes(replicated_bytes, sharded_bytes, stage.num_replicas - 1)
    return not is_within(fewer_bytes, problem.device_types[stage.device_type].usable_bytes)


def _single_type(problem: SchedulingProblem, name: str) -> SingleType:
    try:
        stages = balance_replicas(problem, [LayerRun(0, problem.num_layers - 1, name)])
    except InfeasiblePlanError as error:
        return SingleType(device_type=name, cost_usd=None, broken_constraint=error.constraint)
    return SingleType(device_type=name, cost_usd=evaluate(problem, stages).cost_usd, broken_constraint="")
