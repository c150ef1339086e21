"""A planning problem whose times were stretched by what past runs on the same device types have shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from heterps_core.planning.problem.scheduling_problem import LayerCosts, SchedulingProblem


def corrected_problem(problem: SchedulingProblem, factors: Mapping[str, float]) -> SchedulingProblem:
    """Return the problem with all times on a device type multiplied by its factor.

    Computing, communication in a stage and across its boundaries are stretched alike, since a run measures how long a
    stage was busy and not with what; so ET of every stage on the type is exactly `factor` times as long.

    Args:
        problem: As the profiles have it.
        factors: Device type -> factor, positive; 1 for those that are not named.
    """
    used = {name: factors[name] for name in problem.device_types if factors.get(name, 1.0) != 1.0}
    if not used:
        return problem
    return replace(
        problem,
        layers=tuple(_stretched(layer, used) for layer in problem.layers),
        device_types={
            name: replace(unit, bandwidth_bytes_per_s=unit.bandwidth_bytes_per_s / used.get(name, 1.0))
            for name, unit in problem.device_types.items()
        },
    )


def _stretched(layer: LayerCosts, factors: Mapping[str, float]) -> LayerCosts:
    return replace(
        layer,
        compute_seconds={
            name: seconds * factors.get(name, 1.0) for name, seconds in layer.compute_seconds.items()
        },
        communication_seconds={
            name: seconds * factors.get(name, 1.0) for name, seconds in layer.communication_seconds.items()
        },
    )
