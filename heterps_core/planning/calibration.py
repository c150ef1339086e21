"""Corrects predicted times by past runs: per device type, the median of measured over predicted seconds.

A run records the predictions of the cost model without any correction: a correction that was fitted to corrected
predictions would learn from itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from heterps_core.field_rules import Positive, within_limits
from heterps_core.json_codec import JsonDocument, JsonForm
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem

MOST_RUNS = 20
"""Only the newest runs count, as machines and software change."""

LEAST_RUNS = 3
"""With three, one disturbed run does not move the median."""

_PROCESSOR_TIMES = (
    "exchange_seconds",
    "exchange_seconds_per_peer",
    "exchange_seconds_per_table",
    "exchange_seconds_per_byte",
    "sum_seconds_per_peer",
    "sum_seconds_per_byte",
    "boundary_seconds",
    "boundary_seconds_per_byte",
    "later_reading_seconds",
    "later_reading_seconds_per_sample",
)
"""Fields of a unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpeed:
    """One stage of a run."""

    device_type: str
    num_replicas: int
    predicted_seconds: Positive
    """The stage's work for one training batch, by the cost model."""

    measured_seconds: float | None
    """The same in a step, without waits for other stages; None where no worker of the stage reported it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpeed(JsonDocument):
    """A run's predicted and measured speed."""

    json_form = JsonForm(what="run's speed", version=1)

    run_id: str
    model: str
    hardware: str
    """What it ran on: for a dry run the machine; for rented machines their device types."""

    is_dry_run: bool
    predicted_step_seconds: Positive
    """Without any correction."""

    correction_factor: Positive
    measured_step_seconds: Positive
    """Time of the median step."""

    stages: tuple[StageSpeed, ...]

    def ratio_on(self, hardware: str) -> float | None:
        """Return measured over predicted seconds on a device type, for a dry run on a machine; None where unknown.

        A dry run says nothing about the device types that its plan names: it runs on another machine.
        """
        if self.is_dry_run:
            is_here = self.hardware == hardware
            return self.measured_step_seconds / self.predicted_step_seconds if is_here else None
        ratios = [
            stage.measured_seconds / stage.predicted_seconds
            for stage in self.stages
            if stage.device_type == hardware and stage.measured_seconds
        ]
        return median(ratios) if ratios else None


@dataclass(frozen=True, slots=True)
class Correction:
    """What predictions are multiplied by."""

    factor: float = 1.0
    num_runs: int = 0

    def __str__(self) -> str:
        if self.num_runs < LEAST_RUNS:
            return f"not corrected: {self.num_runs} of the {LEAST_RUNS} past runs that a correction needs"
        return f"{self.factor:.3f}, the median of {self.num_runs} past runs"


@dataclass(frozen=True, slots=True)
class Calibration:
    """The speeds of past runs, the oldest first."""

    speeds: tuple[RunSpeed, ...] = ()

    def correction(self, hardware: str, *, model: str) -> Correction:
        """Return the correction of a model's times on a device type, or of its dry runs on a machine."""
        known = (speed.ratio_on(hardware) for speed in self.speeds if speed.model == model)
        ratios = [ratio for ratio in known if ratio is not None][-MOST_RUNS:]
        return Correction(median(ratios) if len(ratios) >= LEAST_RUNS else 1.0, len(ratios))

    def factors(self, problem: SchedulingProblem) -> dict[str, float]:
        """Return the factor on the times of each device type of a problem."""
        return {name: self.correction(name, model=problem.model).factor for name in problem.device_types}

    def corrected(self, problem: SchedulingProblem) -> SchedulingProblem:
        """Return the planning problem with the times that past runs make likely."""
        return with_scaled_times(problem, self.factors(problem))

    def summary(self, problem: SchedulingProblem) -> str:
        """Return the corrections of the plan's times, in one line."""
        found = {name: self.correction(name, model=problem.model) for name in problem.device_types}
        texts = [f"{name} {each}" for name, each in found.items() if each.num_runs >= LEAST_RUNS]
        return (
            f"times multiplied: {'; '.join(texts)}"
            if texts
            else "no calibration: profile times used unchanged"
        )


def with_scaled_times(problem: SchedulingProblem, factors: Mapping[str, float]) -> SchedulingProblem:
    """Return the problem with all times on a device type multiplied by its factor, 1 for types without one.

    Computing, communication in a stage and across its boundaries are stretched alike, since a run measures how long a
    stage was busy and not with what; so ET of every stage on the type is exactly `factor` times as long.
    """
    if all(factors.get(name, 1.0) == 1.0 for name in problem.device_types):
        return problem

    def scaled(seconds: Mapping[str, float]) -> dict[str, float]:
        # 0 stays 0: the limits of a problem file raise it.
        return {
            name: value and within_limits(value * factors.get(name, 1.0)) for name, value in seconds.items()
        }

    return replace(
        problem,
        layers=tuple(
            replace(
                layer,
                compute_seconds=scaled(layer.compute_seconds),
                communication_seconds=scaled(layer.communication_seconds),
                reading_seconds=scaled(layer.reading_seconds),
            )
            for layer in problem.layers
        ),
        device_types={
            name: replace(
                unit,
                bandwidth_bytes_per_s=within_limits(unit.bandwidth_bytes_per_s / factors.get(name, 1.0)),
                **{part: getattr(unit, part) * factors.get(name, 1.0) for part in _PROCESSOR_TIMES},
            )
            for name, unit in problem.device_types.items()
        },
    )
