"""Runs that are over or under way, read back from their record in MLflow."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from heterps_core.errors import ConfigurationError
from heterps_core.planning.calibration import RunSpeed
from infra.workspace import Workspace
from tasks.records.mlflow_names import COMPLETED, DIED, EXPERIMENT, STOPPED, Kind, Tag, TrackedRun
from tasks.records.mlflow_store import answering_client, has_records, runs_of
from tasks.running.run_lifecycle import process_is_gone

_MOST_RUNS_OF_A_DAY = 1_000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRun:
    """A training run as it stands in the record; its figures are None where it never came so far."""

    tracked: TrackedRun
    name: str
    status: str
    """FINISHED, FAILED, KILLED or RUNNING, as MLflow has it."""

    started_at: datetime
    tags: Mapping[str, str]
    parameters: Mapping[str, str]
    metrics: Mapping[str, float]

    @property
    def run_id(self) -> str:
        """Id of the flow run."""
        return self.tracked.run_id

    @property
    def day(self) -> str | None:
        """Day of the data that it trained on, YYYY-MM-DD; None where the data has no days."""
        return self.tags.get(Tag.DAY)

    @property
    def night(self) -> str:
        """The day of its data, else the day of its start."""
        return self.day or f"{self.started_at:%Y-%m-%d}"

    @property
    def by_day(self) -> tuple[str, datetime]:
        """Key by which nights are sorted: a day that is back-filled stands where it belongs."""
        return self.night, self.started_at

    @property
    def model(self) -> str:
        """Its name; parameters come with the plan, and the run's own name begins with it."""
        return self.parameters.get("model") or self.tags.get(Tag.MODEL) or self.name.partition(" ")[0]

    @property
    def plan(self) -> str | None:
        """For instance "4 x cpu-c7i + 1 x gpu-t4"."""
        if "device_types" not in self.parameters:
            return None
        device_types, replicas = (
            re.split(r" [|+] ", self.parameters[name]) for name in ("device_types", "replicas")
        )
        return " + ".join(f"{count} x {kind}" for count, kind in zip(replicas, device_types, strict=True))

    @property
    def outcome(self) -> str:
        """One of `OUTCOMES`: MLflow's status, or that it was asked to stop, or that its process is gone."""
        if self.status == "RUNNING" and process_is_gone(self.tags):
            return DIED
        is_stopped = self.status == "KILLED" and self.tags.get(Tag.END_REASON, "").startswith(STOPPED)
        return STOPPED if is_stopped else self.status.lower()

    @property
    def end_reason(self) -> str | None:
        """Why it ended, or that its process is gone and how to go on."""
        if self.outcome == DIED:
            return (
                f"its process is gone; heterps sweep ends the machines that it left and closes its record, "
                f"resume_run_id={self.run_id} goes on from its newest checkpoint"
            )
        # A run that was resumed has the reason of its first end.
        return None if self.status == "RUNNING" else self.tags.get(Tag.END_REASON)

    @property
    def usd(self) -> float | None:
        """Billed."""
        return self.metrics.get("cost/billed_usd")

    @property
    def throughput_samples_per_s(self) -> float | None:
        """Throughput of the median step, as in all comparisons of nights."""
        return self.metrics.get("measured/undisturbed_throughput_samples_per_s")

    @property
    def auc(self) -> float | None:
        """On held-out rows."""
        return self.metrics.get("quality/auc")

    @property
    def was_promoted(self) -> bool | None:
        """None where there was no decision."""
        promoted = self.tags.get(Tag.PROMOTED)
        return None if promoted is None else promoted == "true"

    @property
    def speed(self) -> RunSpeed | None:
        """Predicted and measured, from which later runs learn; None where it cannot be used."""
        if Tag.SPEED not in self.tags:
            return None
        try:
            return RunSpeed.from_json(json.loads(self.tags[Tag.SPEED]))
        except (ValueError, ConfigurationError) as error:
            logger.warning("the calibration leaves out run %s: %s", self.run_id, error)
            return None

    def summary(self) -> dict[str, Any]:
        """Return the figures by which a person compares runs, as plain JSON values."""
        return {
            "run_id": self.run_id,
            "day": self.day,
            "model": self.model,
            "scheduler": self.parameters.get("method"),
            "plan": self.plan,
            "status": self.status,
            "outcome": self.outcome,
            "end_reason": self.end_reason,
            "usd": self.usd,
            "throughput_samples_per_s": self.throughput_samples_per_s,
            "auc": self.auc,
            "started_at": self.started_at.isoformat(),
        }


def past_trainings(
    workspace: Workspace,
    *,
    most: int,
    day: str | None = None,
    status: str | None = None,
    run_id: str | None = None,
) -> list[PastRun]:
    """Return the newest training runs, the newest last; none where nothing was ever recorded.

    At most 1,000; of the day YYYY-MM-DD of their data, or of any and of none; of a status such as RUNNING, or of any;
    of one run id, or of all.

    Raises:
        ConfigurationError: The record of runs does not answer.
    """
    if not has_records(workspace):
        return []
    wanted = {Tag.KIND: Kind.TRAINING, Tag.DAY: day, Tag.RUN_ID: run_id}
    conditions = [f"tags.`{name}` = '{value}'" for name, value in wanted.items() if value]
    if status:
        conditions.append(f"attributes.status = '{status}'")
    with answering_client(workspace) as client:
        experiment = client.get_experiment_by_name(EXPERIMENT)
        if experiment is None:
            return []
        found = client.search_runs(
            [experiment.experiment_id],
            filter_string=" AND ".join(conditions),
            order_by=["attributes.start_time DESC"],
            max_results=most,
        )
    return [
        PastRun(
            tracked=TrackedRun.of(run),
            name=run.info.run_name or "",
            status=run.info.status,
            started_at=datetime.fromtimestamp(run.info.start_time / 1_000, UTC),
            tags=run.data.tags,
            parameters=run.data.params,
            metrics=run.data.metrics,
        )
        for run in reversed(found)
    ]


def readable_past(workspace: Workspace, *, most: int) -> list[PastRun]:
    """Return the newest training runs, the newest last; none where the record does not answer: no run waits."""
    try:
        return past_trainings(workspace, most=most)
    except ConfigurationError as error:
        logger.warning("past runs cannot be read now: %s", error)
        return []


def check_not_finished(workspace: Workspace, run_id: str) -> None:
    """Check that a run may be resumed: otherwise nothing would be trained, and a good night's record written over.

    Raises:
        ConfigurationError: It has finished, or the record of runs does not answer.
    """
    if not has_records(workspace):
        return
    with answering_client(workspace) as client:
        records = runs_of(client, run_id, Kind.TRAINING)
    for record in records:
        if record.info.status == "FINISHED" and record.data.tags.get(Tag.END_REASON) == COMPLETED:
            ended_at = datetime.fromtimestamp(record.info.end_time / 1_000, UTC)
            raise ConfigurationError(
                f"resume_run_id must be a run that did not come to its end, but {run_id} finished at "
                f"{ended_at:%Y-%m-%d %H:%M} UTC: its model is registered, its checkpoints are deleted, and nothing "
                f"is left to resume; to train its day once more, start a new run with again=True"
            )


def finished_run(workspace: Workspace, *, day: str, data: str, model: str) -> str | None:
    """Return the newest run that has trained the same model on the same day to the end, None where none has.

    Raises:
        ConfigurationError: The record of runs does not answer.
    """
    of_day = past_trainings(workspace, most=_MOST_RUNS_OF_A_DAY, day=day)
    for past in reversed(of_day):
        is_same = past.tags.get(Tag.DATA) == data and past.tags.get(Tag.MODEL) == model
        is_done = past.status == "FINISHED" and past.tags.get(Tag.END_REASON) == COMPLETED
        if is_same and is_done:
            return past.run_id
    return None


def note_skipped(workspace: Workspace, run_id: str, *, at: datetime) -> None:
    """Write at a finished run when a later one found nothing left to do."""
    with answering_client(workspace) as client:
        for record in runs_of(client, run_id, Kind.TRAINING):
            client.set_tag(record.info.run_id, Tag.SKIPPED, at.isoformat(timespec="seconds"))
