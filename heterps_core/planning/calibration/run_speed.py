"""How fast a run was predicted to be and how fast it was, as a whole and by stage: the source of corrections.

Predictions are kept as the cost model made them, before any correction: a correction that was fitted to corrected
predictions would learn from itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from heterps_core.field_rules import Positive
from heterps_core.json_codec import JsonDocument, JsonForm
from heterps_core.plans.scheduling_plan import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredPrediction:
    """A predicted time and what came of it."""

    run_id: str
    """Sorts by time."""

    path: tuple[str, ...]
    """What the prediction was for, from the general to the special: for instance hardware, model, workers."""

    predicted_seconds: float
    """Without any correction, positive."""

    measured_seconds: float
    """Positive."""

    @property
    def log_ratio(self) -> float:
        """log(measured / predicted): 0 for a perfect prediction, above 0 where it was too fast."""
        return math.log(self.measured_seconds / self.predicted_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpeed:
    """One stage of a run."""

    device_type: str
    num_replicas: int
    """That were launched."""

    predicted_seconds: Positive
    """Of its work for one training batch, by the cost model."""

    measured_seconds: float | None
    """Of a step, without waits for other stages; None where no worker of the stage told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpeed(JsonDocument):
    """A run's predicted and measured speed."""

    json_form = JsonForm(what="run's speed", version=1, earlier_names=(("is_rehearsal", "is_dry_run"),))

    run_id: str
    model: str
    hardware: str
    """What it ran on: for a dry run the machine; for rented machines their device types."""

    is_dry_run: bool
    predicted_step_seconds: Positive
    """Without any correction."""

    correction_factor: Positive
    measured_step_seconds: Positive
    """Of the median step."""

    stages: tuple[StageSpeed, ...]

    @property
    def step(self) -> AnsweredPrediction:
        """The whole step."""
        return AnsweredPrediction(
            run_id=self.run_id,
            path=(self.hardware, self.model, workers_text(self.stages)),
            predicted_seconds=self.predicted_step_seconds,
            measured_seconds=self.measured_step_seconds,
        )

    @property
    def rented_stages(self) -> tuple[AnsweredPrediction, ...]:
        """The stages on the device types that the plan named; none of a dry run, which runs on other machines."""
        if self.is_dry_run:
            return ()
        return tuple(
            AnsweredPrediction(
                run_id=self.run_id,
                path=(stage.device_type, self.model),
                predicted_seconds=stage.predicted_seconds,
                measured_seconds=stage.measured_seconds,
            )
            for stage in self.stages
            if stage.measured_seconds
        )

    @property
    def waits(self) -> AnsweredPrediction | None:
        """The step of a rented run beside its slowest stage, which is what the plan takes for it.

        What is above is waits: for messages, for other stages, at the end of a step. None of a dry run, and where a
        stage did not tell.
        """
        measured = [stage.measured_seconds for stage in self.stages if stage.measured_seconds]
        if self.is_dry_run or not measured or len(measured) < len(self.stages):
            return None
        return AnsweredPrediction(
            run_id=self.run_id,
            path=("waits", self.model),
            predicted_seconds=max(measured),
            measured_seconds=self.measured_step_seconds,
        )


def workers_text(stages: Iterable[StageSpeed | Stage]) -> str:
    """Return the replicas by stage, for instance "2 + 1"."""
    return " + ".join(str(stage.num_replicas) for stage in stages)
