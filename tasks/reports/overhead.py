"""How long a run took to come to its first training step: what a night pays before anything is learnt."""

from __future__ import annotations

from datetime import datetime

from heterps_core.training.storage.run_directory import STEPS, RunDirectory
from infra.workspace import Workspace
from tasks.records import tracking
from tasks.records.tracked_run import TrackedRun

START_TO_FIRST_STEP = "overhead/start_to_first_step_s"


def start_to_first_step_s(run: RunDirectory, *, started_at: datetime) -> float | None:
    """Return the seconds from a flow's start to its first training step; None where it has trained none.

    A worker writes its first step down at once, so the first file of steps is as old as that step, by the clock of
    the store. Files of a run that is resumed are older than the flow that resumes it.

    Args:
        run: Where the workers write.
        started_at: Of the flow, with a time zone.
    """
    seconds = [stamp / 1e9 - started_at.timestamp() for stamp in run.stamps(STEPS).values()]
    return min((since for since in seconds if since > 0), default=None)


def record_overhead(
    workspace: Workspace, tracked: TrackedRun, run: RunDirectory, *, started_at: datetime
) -> None:
    """Write to MLflow how long the run took to come to its first training step."""
    seconds = start_to_first_step_s(run, started_at=started_at)
    tracking.record_metrics(workspace, tracked, {START_TO_FIRST_STEP: seconds})
