"""The losses of a run, of machines or of workers: each is written down, and limits how often the run restarts.

An error that comes again the same way is not tried again, and each hour has a budget of restarts. The losses stand in
the run's folder, so that a run that is resumed does not get another budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from heterps_core.cluster import Cluster
from heterps_core.errors import RunStoppedError, TrainingError
from heterps_core.training.node.node_life import leaving_nodes
from heterps_core.training.outcome import MachinesLost
from heterps_core.training.step_metrics import read_progress
from heterps_core.training.storage.run_directory import STEPS, RunDirectory
from heterps_core.units import SECONDS_PER_HOUR
from infra.workspace import Workspace
from tasks.clusters import local_folder
from tasks.running.fleet import FleetRun

LOSSES_FILE = "losses.json"

_UNEXPECTED_RESTARTS_PER_HOUR = 2
"""For a fleet that the market does not interrupt: a third loss within the hour has a cause that new machines do not
cure."""

_RESTARTS_PER_EXPECTED = 2.0
"""Restarts for each interruption that the plan expects. Twice a mean of 4 in an hour is exceeded in 2 % of hours."""

_BUDGET_PERIOD = timedelta(hours=1)

_LEAST_MEASURED_S = 30.0
"""Least time of training before its speed says more than its plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loss:
    """A launch that ended before its training did."""

    launch_id: str
    at: str
    """ISO 8601, with a time zone."""

    message: str
    signature: str | None
    """The same if the same error comes once more; None for losses that are left to chance."""

    last_step: int
    """The last that is known to be trained."""

    checkpoint_step: int
    """From which the run goes on."""

    is_noticed: bool = False
    """The cloud gave notice."""

    ended_run: bool = False
    """The restarts of its hour were used up."""

    usd_per_hour: float = 0.0
    """Price of the fleet that it stopped."""

    decision: str = ""
    """How the run went on, and the expected costs; empty where it ended, or workers alone were started again."""

    is_of_other_size: bool = False
    """The run went on with machines for fewer workers, or more."""

    attempt: int = -1
    """The training of the run that reported the last step; -1 where none has."""

    slowness: float = 1.0
    """Seconds of a step over those that were planned for the fleet that was lost."""

    @property
    def what(self) -> str:
        """The loss, in one line."""
        return self.message.partition("; its log is")[0].splitlines()[0]

    @property
    def lost_steps(self) -> int:
        """Steps that are trained again."""
        return max(self.last_step - self.checkpoint_step, 0)

    @property
    def summary(self) -> str:
        """The loss and where the run goes on, in one line."""
        return (
            f"{self.what}: {self.lost_steps:,} steps are lost, and the run goes on from step "
            f"{self.checkpoint_step:,}"
        )


def _restart_budget(asked: int | None, *, interruptions_per_hour: float) -> int:
    """Return how often a run may restart within an hour: as asked, by default by the interruptions of its plan.

    Args:
        interruptions_per_hour: Of the whole fleet, by its plan.

    Example:
        >>> _restart_budget(None, interruptions_per_hour=0.0), _restart_budget(None, interruptions_per_hour=4.2)
        (2, 11)
    """
    if asked is not None:
        return asked
    return _UNEXPECTED_RESTARTS_PER_HOUR + math.ceil(_RESTARTS_PER_EXPECTED * interruptions_per_hour)


def note_loss(
    run: FleetRun,
    lost: MachinesLost,
    *,
    cluster: Cluster,
    interruptions_per_hour: float,
    now: datetime,
    slowness: float = 1.0,
) -> _Loss:
    """Write down a loss of a run, and check that the run may restart.

    Steps that an earlier loss has counted are not counted again where nothing was trained since.

    Args:
        cluster: Where machines or workers were lost.
        interruptions_per_hour: That its plan expects.

    Raises:
        RunStoppedError: The run was asked to stop; says how to go on.
        TrainingError: It ended as it did before, or the restarts of this hour are used up; says how to go on.
    """
    from heterps_core.training.checkpoint import complete_checkpoints

    run_id, progress = run.run_id, read_progress(run.directory)
    complete = complete_checkpoints(run.directory)
    checkpoint_step = int(complete[-1]) if complete else 0
    if run.directory.stop_reason() == "" and not leaving_nodes(run.directory):
        raise RunStoppedError(
            f"run {run_id} was asked to stop, and ended before it wrote another checkpoint; set "
            f"resume_run_id={run_id} to go on from step {checkpoint_step:,}: {lost.message}"
        )
    earlier = _read_losses(run.workspace, run_id)
    attempt = -1 if progress is None else progress.attempt
    is_counted = bool(earlier) and earlier[-1].attempt == attempt
    budget = _restart_budget(run.max_restarts_per_hour, interruptions_per_hour=interruptions_per_hour)
    num_recent = 1 + sum(now - datetime.fromisoformat(each.at) < _BUDGET_PERIOD for each in earlier)
    loss = _Loss(
        launch_id=cluster.run_id,
        at=now.isoformat(),
        message=lost.message,
        signature=lost.signature,
        last_step=checkpoint_step if progress is None or is_counted else progress.step,
        checkpoint_step=checkpoint_step,
        is_noticed=lost.is_noticed,
        ended_run=num_recent > budget,
        usd_per_hour=cluster.price_usd_per_hour,
        attempt=attempt,
        slowness=slowness,
    )
    _write_losses(run.workspace, run_id, [*earlier, loss])
    if loss.signature is not None and earlier and loss.signature == earlier[-1].signature:
        raise TrainingError(
            f"a fault that comes again is not tried again, and launch {loss.launch_id} ended as the one before: "
            f"{lost.message}"
        )
    if loss.ended_run:
        raise TrainingError(
            f"a run may restart {budget} times in an hour, but {run_id} has lost machines or workers "
            f"{num_recent} times; look what the losses have in common, then set resume_run_id={run_id} to go on "
            f"from step {loss.checkpoint_step:,}, or raise max_restarts_per_hour; the last: {lost.message}"
        )
    return loss


def _read_losses(workspace: Workspace, run_id: str) -> list[_Loss]:
    """Return the losses of a run, the oldest first."""
    return [_Loss(**each) for each in local_folder(workspace, run_id).read_json(LOSSES_FILE) or []]


def slowness_of(
    workspace: Workspace, run_id: str, run_directory: RunDirectory, *, planned_samples_per_s: float
) -> float:
    """Return the seconds of a step over those planned; for a fleet that has just begun, those of the one before."""
    progress, losses = read_progress(run_directory), _read_losses(workspace, run_id)
    attempt, slowness = (losses[-1].attempt, losses[-1].slowness) if losses else (-1, 1.0)
    if progress is None or progress.attempt == attempt or progress.elapsed_s < _LEAST_MEASURED_S:
        return slowness
    return planned_samples_per_s * progress.elapsed_s / progress.num_samples


def losses_document(workspace: Workspace, run_id: str) -> dict[str, Any]:
    """Return the losses of a run, for its record."""
    return {"losses": [asdict(each) for each in _read_losses(workspace, run_id)]}


def note_decision(workspace: Workspace, run_id: str, decision: str, *, is_of_other_size: bool) -> None:
    """Write down how a run goes on after its last loss, in its folder."""
    *earlier, last = _read_losses(workspace, run_id)
    last = replace(last, decision=decision, is_of_other_size=is_of_other_size)
    _write_losses(workspace, run_id, [*earlier, last])


def _write_losses(workspace: Workspace, run_id: str, losses: Sequence[_Loss]) -> None:
    local_folder(workspace, run_id).write_json(LOSSES_FILE, [asdict(each) for each in losses])


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """A loss and its cost."""

    loss: _Loss
    seconds: float | None
    """From the last step that is known to be trained until the same step is trained again; None where it was not."""

    @property
    def usd(self) -> float | None:
        """The fleet's price for this time."""
        return None if self.seconds is None else self.loss.usd_per_hour * self.seconds / SECONDS_PER_HOUR


def restarts_of(workspace: Workspace, run_id: str, run_directory: RunDirectory) -> tuple[Restart, ...]:
    """Return the losses of a run and their cost, the oldest first, by the times at which its steps were written."""
    # Files of steps are named attempt-step, by the first step that they hold.
    written = sorted(
        (stamp / 1e9, int(name.rpartition("-")[2].partition(".")[0]))
        for name, stamp in run_directory.stamps(STEPS).items()
    )
    restarts = []
    for loss in _read_losses(workspace, run_id):
        at_s = datetime.fromisoformat(loss.at).timestamp()
        before_s = max((stamp_s for stamp_s, _ in written if stamp_s <= at_s), default=at_s)
        again_s = min(
            (stamp_s for stamp_s, step in written if stamp_s > at_s and step >= loss.last_step), default=None
        )
        restarts.append(Restart(loss=loss, seconds=None if again_s is None else again_s - before_s))
    return tuple(restarts)


def restarts_text(workspace: Workspace, run_id: str) -> str | None:
    """Return for people how often a run lost machines or workers; None where it never did."""
    losses = _read_losses(workspace, run_id)
    if not losses:
        return None
    noticed = sum(loss.is_noticed for loss in losses)
    ended = [loss.at for loss in losses if loss.ended_run]
    used_up = f"; the restarts of an hour were used up at {', '.join(ended)}" if ended else ""
    return f"machines or workers were lost {len(losses)} times, {noticed} with notice{used_up}"
