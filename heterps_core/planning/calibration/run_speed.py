"""How fast a run was predicted to be and how fast it was, as a whole and by stage: what corrections are learnt from.

Predictions are kept as the cost model made them, before any correction: a correction that was fitted to corrected
predictions would learn from itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from heterps_core.errors import ConfigurationError
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.schema_version import check_schema_version

SCHEMA_VERSION = 1


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

    predicted_seconds: float
    """Of its work for one training batch, by the cost model."""

    measured_seconds: float | None
    """Of a step, without waits for other stages; None where no worker of the stage told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpeed:
    """A run's predicted and measured speed."""

    run_id: str
    model: str
    hardware: str
    """What it ran on: for a rehearsal the machine; for rented machines their device types."""

    is_rehearsal: bool
    predicted_step_seconds: float
    """Without any correction."""

    correction_factor: float
    """By which the prediction was stretched before the run."""

    measured_step_seconds: float
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
        """The stages on the device types that the plan named; none of a rehearsal, which runs on other machines."""
        if self.is_rehearsal:
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

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RunSpeed:
        """Read what `to_json` wrote.

        Raises:
            ConfigurationError: The schema version is another one, or a field is missing or unusable.
        """
        check_schema_version(
            document, SCHEMA_VERSION, what="a run's speed", way_out="it was written by another version"
        )
        try:
            speed = cls(
                **{name: document[name] for name in cls.__dataclass_fields__ if name != "stages"},
                stages=tuple(StageSpeed(**stage) for stage in document["stages"]),
            )
        except (KeyError, TypeError) as error:
            raise ConfigurationError(f"a run's speed lacks or spoils a field: {error!r}") from error
        seconds = (speed.predicted_step_seconds, speed.measured_step_seconds, speed.correction_factor)
        stage_seconds = [stage.predicted_seconds for stage in speed.stages]
        if not all(math.isfinite(value) and value > 0 for value in (*seconds, *stage_seconds)):
            raise ConfigurationError(f"the seconds of a run's speed must be positive, got {document}")
        return speed


def workers_text(stages: Iterable[StageSpeed | Stage]) -> str:
    """Return the replicas by stage, for instance "2 + 1"."""
    return " + ".join(str(stage.num_replicas) for stage in stages)
