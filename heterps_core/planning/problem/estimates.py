"""The times of a problem that may be off, and the problem as it is where they are.

All times of one kind of hardware and one quantity are taken to be off together, since a wrong published figure or a
busy machine moves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from heterps_core.field_rules import within_limits
from heterps_core.hardware import hardware_name
from heterps_core.planning.problem.scheduling_problem import LayerCosts, SchedulingProblem

Factor = Callable[[LayerCosts, str], float]


class Quantity(StrEnum):
    """What of a device type takes time."""

    COMPUTING = "computing"
    COMMUNICATION = "communication"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Estimate:
    """The times of one quantity on one kind of hardware."""

    device_type: str
    """The hardware: bought in two markets it is as fast."""

    quantity: Quantity

    def __str__(self) -> str:
        return f"{self.quantity} on {self.device_type}"


def estimates_of(problem: SchedulingProblem) -> dict[Estimate, float]:
    """Return what may be off, with the largest spread of its times as a share of them; all are above 0."""
    spreads: dict[Estimate, float] = {}
    for name, unit in problem.device_types.items():
        computing = max(layer.compute_relative_spread.get(name, 0.0) for layer in problem.layers)
        for quantity, spread in (
            (Quantity.COMPUTING, computing),
            (Quantity.COMMUNICATION, unit.communication_relative_spread),
        ):
            estimate = Estimate(device_type=hardware_name(name), quantity=quantity)
            spreads[estimate] = max(spread, spreads.get(estimate, 0.0))
    return {estimate: spread for estimate, spread in spreads.items() if spread > 0}


def with_scaled_times(
    problem: SchedulingProblem,
    *,
    computing: Factor = lambda *_: 1.0,
    in_stage: Factor = lambda *_: 1.0,
    across: Mapping[str, float] | None = None,
) -> SchedulingProblem:
    """Return the problem with times multiplied: of computing, of communication in a stage and across boundaries.

    `computing` and `in_stage` are positive factors on the times of each layer on a device type; `across` has one for
    each device type, 1 for those that are not named.
    """

    def scaled(layer: LayerCosts, seconds: Mapping[str, float], factor: Factor) -> dict[str, float]:
        return {
            name: within_limits(value * factor(layer, name)) if value else 0.0
            for name, value in seconds.items()
        }

    return replace(
        problem,
        layers=tuple(
            replace(
                layer,
                compute_seconds=scaled(layer, layer.compute_seconds, computing),
                communication_seconds=scaled(layer, layer.communication_seconds, in_stage),
            )
            for layer in problem.layers
        ),
        device_types={
            name: replace(
                unit,
                bandwidth_bytes_per_s=within_limits(
                    unit.bandwidth_bytes_per_s / (across or {}).get(name, 1.0)
                ),
            )
            for name, unit in problem.device_types.items()
        },
    )
