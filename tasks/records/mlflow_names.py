"""Names of runs and models in MLflow: experiments, tags, kinds, aliases, and the ids of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mlflow.entities import Run

EXPERIMENT = "train-ctr"
COMPARISON_EXPERIMENT = "compare-schedulers"

COMPLETED = "completed"
"""End reason of a run that trained, and not only planned."""

STOPPED, DIED = "stopped", "died"
"""Outcomes of runs that MLflow has no status for; the end reason of a run that was asked
to stop begins with the first."""

OUTCOMES = ("finished", "failed", "killed", STOPPED, DIED, "running")

MADE_UP_DATA = "synthetic click stream"

REGISTERED_MODEL = "ctr"
CHALLENGER_ALIAS = "challenger"
CHAMPION_ALIAS = "champion"


class Tag(StrEnum):
    """Names of tags of runs, of the experiment and of versions of the registered model."""

    RUN_ID = "heterps.run_id"
    KIND = "heterps.kind"
    CHOSEN = "heterps.chosen"
    END_REASON = "heterps.end_reason"
    HOST = "heterps.host"
    DAY = "heterps.day"
    """Day of the rows that were trained on, YYYY-MM-DD; missing where the data has no days."""

    DATA = "heterps.data"
    MODEL = "heterps.model"
    SCHEMA = "heterps.schema"
    """`DataSchema.meaning` of a version's rows; missing at versions from before there was this tag."""

    SKIPPED = "heterps.skipped"
    """When a later run last found this one's day done, and did nothing."""

    START = "heterps.start_version"
    """Version of the registered model whose weights training began with; missing where it began with new ones."""

    PROMOTED = "heterps.promoted"
    """"true" or "false": whether the model became champion, once that was decided; on the version and its run."""

    DECISION = "heterps.decision"
    SINCE = "heterps.champion_since"
    ROLLED_BACK = "heterps.rolled_back_at"
    SHA256 = "heterps.model_sha256"
    SPEED = "heterps.speed"
    """Predicted and measured speed as JSON, from which later runs learn."""

    CURVE = "heterps.curve"
    """Short trainings of a curve of quality as JSON, for runs with the same data and model."""

    PROCESS = "heterps.process"
    """The process that opened a run, by its pid and its start time."""

    PARENT = "mlflow.parentRunId"
    """MLflow shows a run that has it below the run that it names."""

    NOTE = "mlflow.note.content"
    EXPERIMENT_KIND = "mlflow.experimentKind"
    """With it MLflow need not guess, and opens the table of runs."""


class Kind(StrEnum):
    """Kinds of runs."""

    TRAINING = "training"
    SEARCH = "search"
    COMPARISON = "comparison"
    PROFILING = "profiling"
    TUNING = "tuning"


TRAINING_VIEW = "workflowType=machine_learning"
"""Part of an address; without it MLflow opens its view of language models."""

EndStatus = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """An MLflow run by its ids."""

    mlflow_run_id: str
    experiment_id: str
    run_id: str

    @classmethod
    def of(cls, run: Run) -> TrackedRun:
        """Return the ids of an MLflow run of ours."""
        run_id = run.data.tags[Tag.RUN_ID]
        return cls(mlflow_run_id=run.info.run_id, experiment_id=run.info.experiment_id, run_id=run_id)

    def address(self, mlflow_url: str) -> str:
        """Return the page of this run in an MLflow UI at `mlflow_url`, in its view of model training."""
        return f"{mlflow_url}/#/experiments/{self.experiment_id}/runs/{self.mlflow_run_id}?{TRAINING_VIEW}"


def night_name(day: str | None, run_id: str, *, model: str, scheduler: str) -> str:
    """Return what a person calls a run by: the day of its data, else that of its start, model and scheduler.

    Example:
        >>> night_name(None, "20261121-0430-567890ab", model="ctrdnn", scheduler="exact")
        '2026-11-21 ctrdnn exact'
    """
    return f"{day or f'{run_id[:4]}-{run_id[4:6]}-{run_id[6:8]}'} {model} {scheduler}"
