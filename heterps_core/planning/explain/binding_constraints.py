"""Which constraints cost money: what the cheapest plan would cost without the floor, a cap or a memory limit.

Each is lifted alone, so two that only bind together are not found; caps and memory are lifted one device type at
a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from heterps_core.planning.explain.variants import (
    SAME_COST,
    cheapest_plan,
    with_floor,
    without_cap,
    without_memory_limit,
)
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.plans.scheduling_plan import Stage

THROUGHPUT_FLOOR = "throughput floor"
UNITS_CAP = "units cap"
MEMORY = "memory"
"""Named as in `Violation.constraint`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BindingConstraint:
    """A constraint without which a cheaper plan exists."""

    constraint: str
    device_type: str
    """Whose cap or memory; empty for the floor."""

    limit: float
    """samples/s, units or bytes."""

    saving_usd: float
    """What the cheapest plan costs less where only this constraint is lifted: its price."""

    stages: tuple[Stage, ...]
    """The cheapest plan without it."""


def price_of_floor(problem: SchedulingProblem, cost_usd: float) -> tuple[BindingConstraint, ...]:
    """Return what the throughput floor costs, nothing where it costs nothing.

    Args:
        problem: What is planned.
        cost_usd: Of the cheapest plan.
    """
    return _binding(cost_usd, _lifted_floor(problem))


def prices_of_units(problem: SchedulingProblem, cost_usd: float) -> tuple[BindingConstraint, ...]:
    """Return the caps and memory limits that cost something, the most expensive first.

    Args:
        problem: What is planned.
        cost_usd: Of the cheapest plan.
    """
    binding = _binding(cost_usd, _lifted_limits(problem))
    return tuple(sorted(binding, key=lambda constraint: -constraint.saving_usd))


_Lifted = tuple[str, str, float, SchedulingProblem]


def _lifted_floor(problem: SchedulingProblem) -> Iterator[_Lifted]:
    floor = problem.throughput_floor_samples_per_s
    if floor > 0:
        yield THROUGHPUT_FLOOR, "", floor, with_floor(problem, 0.0)


def _lifted_limits(problem: SchedulingProblem) -> Iterator[_Lifted]:
    for name, unit in problem.device_types.items():
        yield UNITS_CAP, name, unit.max_units, without_cap(problem, name)
        yield MEMORY, name, unit.memory_bytes, without_memory_limit(problem, name)


def _binding(cost_usd: float, lifted: Iterator[_Lifted]) -> tuple[BindingConstraint, ...]:
    found = []
    for constraint, device_type, limit, without in lifted:
        cheapest = cheapest_plan(without)
        if cheapest is None or cheapest.cost_usd >= cost_usd * (1 - SAME_COST):
            continue
        found.append(
            BindingConstraint(
                constraint=constraint,
                device_type=device_type,
                limit=limit,
                saving_usd=cost_usd - cheapest.cost_usd,
                stages=cheapest.stages,
            )
        )
    return tuple(found)
