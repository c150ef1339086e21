"""What becomes of a run that loses machines or workers: it is noted, and the run goes on by itself with others.

Of a spot machine the notice comes two minutes ahead: the workers write a checkpoint and end
(`heterps_core/training/node/leaving.py`). The flow ends what is left of the fleet, plans again for what can still be
bought, and goes on from the newest complete checkpoint. What comes again the same way is not tried again, and each
hour has a budget of tries: the record stands in the run's folder, so that a run that is resumed does not get
another.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from heterps_core.errors import InterruptedTrainingError, TrainingError
from heterps_core.training.node.node_life import leaving_nodes
from heterps_core.training.step_metrics import read_progress
from heterps_core.training.storage.run_directory import STOP, RunDirectory
from heterps_core.training.training_run import TrainingRun
from infra.workspace import Workspace
from tasks.clusters import local_folder

LOSSES_FILE = "losses.json"

MAX_TRIES_PER_HOUR = 3
"""Launches of a run in an hour that may be lost. A machine of a spot pool of CPUs lasts 1.7 h on average
(`infra/prices/spot_charges.py`), so one or two of a fleet may be lost in an hour; a third without a notice says
that something is wrong which new machines do not cure, and each costs a start-up and up to 200 steps again."""

BUDGET_PERIOD = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A launch that ended before its training did."""

    launch_id: str
    at: str
    """ISO 8601, with a time zone."""

    message: str
    signature: str | None
    """What would be the same if the same error came once more; None for what is left to chance."""

    last_step: int
    """The last that is known to be trained."""

    checkpoint_step: int
    """From which the next launch goes on."""

    @property
    def summary(self) -> str:
        """What happened and what comes next, in one line."""
        what = self.message.partition("; its log is")[0].splitlines()[0]
        return (
            f"{what}: {max(self.last_step - self.checkpoint_step, 0):,} steps are lost, and "
            f"the run goes on from step {self.checkpoint_step:,} with new machines"
        )


def note_loss(
    workspace: Workspace,
    run_id: str,
    error: InterruptedTrainingError,
    *,
    run_directory: RunDirectory,
    launch_id: str,
    now: datetime,
) -> Loss:
    """Write down that a launch was lost, and check that another may be tried.

    Raises:
        TrainingError: The run was asked to stop, or ended as the launch before did, or the tries of this hour are
            used up; says how to go on.
    """
    from heterps_core.training.checkpoint import complete_checkpoints

    leaving = leaving_nodes(run_directory)
    progress = read_progress(run_directory)
    complete = complete_checkpoints(run_directory)
    checkpoint_step = int(complete[-1]) if complete else 0
    if run_directory.exists(STOP) and not leaving:
        raise TrainingError(
            f"run {run_id} was asked to stop, and ended before it wrote another checkpoint; set "
            f"resume_run_id={run_id} to go on from step {checkpoint_step:,}: {error}"
        ) from error
    loss = Loss(
        launch_id=launch_id,
        at=now.isoformat(),
        message=str(error),
        signature=error.signature,
        last_step=0 if progress is None else progress.step,
        checkpoint_step=checkpoint_step,
    )
    earlier = read_losses(workspace, run_id)
    local_folder(workspace, run_id).write_json(LOSSES_FILE, [asdict(each) for each in (*earlier, loss)])
    if loss.signature is not None and earlier and loss.signature == earlier[-1].signature:
        raise TrainingError(
            f"a fault that comes again is not tried again, and launch {loss.launch_id} ended as the one before: "
            f"{error}"
        ) from error
    recent = [each for each in (*earlier, loss) if now - datetime.fromisoformat(each.at) < BUDGET_PERIOD]
    if len(recent) >= MAX_TRIES_PER_HOUR:
        raise TrainingError(
            f"a run must lose fewer than {MAX_TRIES_PER_HOUR} launches in an hour, but {run_id} has lost "
            f"{len(recent)}; look what they have in common, then set resume_run_id={run_id} to go on from step "
            f"{loss.checkpoint_step:,}; the last: {error}"
        ) from error
    return loss


def read_losses(workspace: Workspace, run_id: str) -> list[Loss]:
    """Return what was lost of a run without notice, oldest first."""
    return [Loss(**each) for each in local_folder(workspace, run_id).read_json(LOSSES_FILE) or []]


def interruption_summary(training: TrainingRun, leaving: list[str]) -> str:
    """Return what happened and what comes next, in one line."""
    step = training.steps[-1].step if training.steps else 0
    return (
        f"{', '.join(leaving)} will be preempted: a checkpoint of step {step:,} is written, and the run goes on "
        f"from there with other machines"
    )
