"""The same problem with one thing changed, and the cheapest plan then: what every explanation is made of.

Numbers are held within the limits of a problem file, so that asking "what if" never breaks the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from heterps_core.errors import InfeasiblePlanError
from heterps_core.field_rules import LARGEST_NUMBER, SMALLEST_POSITIVE
from heterps_core.planning.problem.scheduling_problem import (
    MAX_UNITS,
    LayerCosts,
    SchedulingProblem,
    UnitType,
)
from heterps_core.planning.search.optimum import Optimum, find_optimum

SAME_COST = 1e-9
"""Costs that differ by less than this share are equal."""

CAP_FACTOR = 20
"""How many times the units there are when a cap is lifted; the tables of whole instances grow with it."""


def cheapest_plan(problem: SchedulingProblem) -> Optimum | None:
    """Return the cheapest plan, or None where none keeps the constraints."""
    try:
        return find_optimum(problem)
    except InfeasiblePlanError:
        return None


def with_price_factor(problem: SchedulingProblem, device_type: str, factor: float) -> SchedulingProblem:
    """Return the problem with all prices of a device type, of every size that is sold, times a factor."""
    unit = problem.device_types[device_type]
    instances = tuple(
        replace(size, price_usd_per_hour=_within_limits(size.price_usd_per_hour * factor))
        for size in unit.instances
    )
    unit_prices = [size.price_usd_per_hour / size.units for size in instances]
    price = min(unit_prices, default=unit.price_usd_per_hour * factor)
    return _with_unit(
        problem,
        device_type,
        replace(unit, price_usd_per_hour=_within_limits(price), instances=instances),
    )


def with_floor(problem: SchedulingProblem, floor_samples_per_s: float) -> SchedulingProblem:
    """Return the problem with another throughput floor; 0 for none."""
    return replace(problem, throughput_floor_samples_per_s=min(floor_samples_per_s, LARGEST_NUMBER))


def without_cap(problem: SchedulingProblem, device_type: str) -> SchedulingProblem:
    """Return the problem with `CAP_FACTOR` times the units of a device type."""
    unit = problem.device_types[device_type]
    return _with_unit(
        problem, device_type, replace(unit, max_units=min(CAP_FACTOR * unit.max_units, MAX_UNITS))
    )


def without_memory_limit(problem: SchedulingProblem, device_type: str) -> SchedulingProblem:
    """Return the problem with units of a device type that hold everything."""
    unit = problem.device_types[device_type]
    return _with_unit(problem, device_type, replace(unit, memory_bytes=LARGEST_NUMBER))


def without_type(problem: SchedulingProblem, device_type: str) -> SchedulingProblem:
    """Return the problem without a device type; at least one other must be left."""

    def others(values: Mapping[str, float]) -> dict[str, float]:
        return {name: value for name, value in values.items() if name != device_type}

    return replace(
        problem,
        layers=tuple(
            replace(
                layer,
                compute_seconds=others(layer.compute_seconds),
                communication_seconds=others(layer.communication_seconds),
                compute_relative_spread=others(layer.compute_relative_spread),
            )
            for layer in problem.layers
        ),
        device_types={name: unit for name, unit in problem.device_types.items() if name != device_type},
    )


def with_layer_seconds(
    problem: SchedulingProblem, layer: int, device_type: str, compute_seconds: float
) -> SchedulingProblem:
    """Return the problem with another compute time of one layer on one device type."""
    changed = replace(
        problem.layers[layer],
        compute_seconds={
            **problem.layers[layer].compute_seconds,
            device_type: min(compute_seconds, LARGEST_NUMBER),
        },
    )
    return replace(problem, layers=(*problem.layers[:layer], changed, *problem.layers[layer + 1 :]))


def with_compute_factors(
    problem: SchedulingProblem, factor_of: Callable[[LayerCosts, str], float]
) -> SchedulingProblem:
    """Return the problem with every compute time times a factor of its layer and device type, positive."""

    def scaled(layer: LayerCosts) -> Mapping[str, float]:
        return {
            name: _within_limits(seconds * factor_of(layer, name)) if seconds else 0.0
            for name, seconds in layer.compute_seconds.items()
        }

    return replace(
        problem, layers=tuple(replace(layer, compute_seconds=scaled(layer)) for layer in problem.layers)
    )


def _with_unit(problem: SchedulingProblem, device_type: str, unit: UnitType) -> SchedulingProblem:
    return replace(problem, device_types={**problem.device_types, device_type: unit})


def _within_limits(value: float) -> float:
    return min(max(value, SMALLEST_POSITIVE), LARGEST_NUMBER)
