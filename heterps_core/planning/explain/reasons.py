"""Why the plan is as it is: what each device type is good for, what the next best plans cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterps_core.device_types import hardware_of
from heterps_core.field_rules import LARGEST_NUMBER
from heterps_core.planning.cost_model.evaluation import (
    PlanEvaluation,
    StageEvaluation,
)
from heterps_core.planning.explain.placement import Move, moves_between
from heterps_core.planning.explain.variants import SAME_COST, cheapest_plan, with_layer_seconds
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.units import SECONDS_PER_HOUR, ratio

FARTHEST_FACTOR = 20.0
"""Plans that cost more than this many times the cheapest one are not looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeRole:
    """What a device type does in the plan."""

    device_type: str
    runs: tuple[tuple[int, int], ...]
    num_units: int
    state_bytes: float
    price_share: float
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
class RunnerUp:
    """The cheapest plan with another placement."""

    stages: tuple[Stage, ...]
    cost_usd: float
    extra_usd: float
    moves: tuple[Move, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherPlan:
    """The cheapest plan among other device types."""

    hardware: str
    """The processor or card that it does without; empty where it has types that the problem lacks."""

    stages: tuple[Stage, ...]
    extra_usd: float
    """What it costs more than the cheapest plan; below 0 for less."""


def find_roles(problem: SchedulingProblem, evaluation: PlanEvaluation) -> tuple[TypeRole, ...]:
    """Return what each device type of a plan does, in the order of the chain."""
    parts: dict[str, list[StageEvaluation]] = {}
    for part in evaluation.stages:
        for name in part.stage.replicas_by_type:
            parts.setdefault(name, []).append(part)
    return tuple(_role(problem, evaluation, name, mine) for name, mine in parts.items())


def find_runner_up(problem: SchedulingProblem, stages: Sequence[Stage], cost_usd: float) -> RunnerUp | None:
    """Return the cheapest plan that differs from the optimum in the device type of at least one layer.

    Exact where no search runs out of time: such a plan avoids the optimum's device type for some layer, and for each
    layer the cheapest plan that avoids it is found. One such search for each layer, fewer where one of them costs as
    little as the optimum.

    Returns:
        None where every other placement costs over `FARTHEST_FACTOR` times as much, or breaks a constraint.
    """
    best: RunnerUp | None = None
    # Only plans more expensive than the limit keep the layer where it is made too slow to be.
    limit_usd = FARTHEST_FACTOR * cost_usd
    layers = (
        (layer, name)
        for stage in stages
        for layer in range(stage.first_layer, stage.last_layer + 1)
        for name in stage.replicas_by_type
    )
    for layer, device_type in layers:
        if best is not None and best.extra_usd <= SAME_COST * cost_usd:
            break  # a tie cannot be undercut
        seconds = _unaffordable_seconds(problem, device_type, limit_usd)
        found = cheapest_plan(with_layer_seconds(problem, layer, device_type, seconds))
        if found is None or found.cost_usd > (best.cost_usd if best else limit_usd):
            continue
        moves = moves_between(stages, found.stages)
        if moves:
            best = RunnerUp(
                stages=found.stages,
                cost_usd=found.cost_usd,
                extra_usd=max(0.0, found.cost_usd - cost_usd),
                moves=moves,
            )
    return best


def find_nearest(
    problem: SchedulingProblem, stages: Sequence[Stage], cost_usd: float
) -> tuple[OtherPlan, ...]:
    """Return the cheapest plan without each processor and card of a plan, the nearest first.

    Where no plan does without one, it is left out. A search for each.
    """
    found = []
    for hardware in {hardware_of(name) for stage in stages for name in stage.replicas_by_type}:
        others = [name for name in problem.device_types if hardware_of(name) != hardware]
        optimum = cheapest_plan(problem.of_types(others)) if others else None
        if optimum is not None:
            extra_usd = optimum.cost_usd - cost_usd
            found.append(OtherPlan(hardware=hardware, stages=optimum.stages, extra_usd=extra_usd))
    return tuple(sorted(found, key=lambda each: (each.extra_usd, each.hardware)))


def _role(
    problem: SchedulingProblem, evaluation: PlanEvaluation, name: str, parts: Sequence[StageEvaluation]
) -> TypeRole:
    layers = [index for part in parts for index in range(part.stage.first_layer, part.stage.last_layer + 1)]
    seconds = {other: _work_seconds(problem, layers, other) for other in problem.device_types}
    work_usd = {
        other: seconds[other] * unit.price_usd_per_hour for other, unit in problem.device_types.items()
    }
    next_type = min((other for other in work_usd if other != name), key=work_usd.__getitem__, default="")
    is_comparable = next_type != "" and seconds[name] > 0 and work_usd[name] > 0
    return TypeRole(
        device_type=name,
        runs=tuple((part.stage.first_layer, part.stage.last_layer) for part in parts),
        num_units=sum(part.stage.replicas_by_type[name] for part in parts),
        state_bytes=sum(problem.layers[index].state_bytes for index in layers),
        price_share=ratio(
            sum(part.usd_per_hour_by_type[name] for part in parts),
            evaluation.price_usd_per_hour,
            otherwise=0.0,
        ),
        next_type=next_type,
        next_cost_ratio=work_usd[next_type] / work_usd[name] if is_comparable else 0.0,
        next_time_ratio=seconds[next_type] / seconds[name] if is_comparable else 0.0,
        num_memory_bound_stages=sum(1 < part.stage.num_replicas <= part.fewest_replicas for part in parts),
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


def _unaffordable_seconds(problem: SchedulingProblem, device_type: str, limit_usd: float) -> float:
    """Return the compute time of one layer with which any plan costs more than the limit.

    The stage of that layer alone costs price * k * CT(k) for each batch, and k * CT(k) = OCT * B/B_o * (k - alpha
    (k - 1)) is least at k = 1. So OCT = limit / (price * steps * B/B_o) is enough.
    """
    unit = problem.device_types[device_type]
    batches = problem.num_steps * problem.batch_size / problem.profile_batch_size
    return ratio(limit_usd * SECONDS_PER_HOUR, unit.price_usd_per_hour * batches, otherwise=LARGEST_NUMBER)
