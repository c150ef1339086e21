"""The whole line: data, profile, plan, machines, training, teardown, record and bill.

`make train-ctr` runs it from the command line, `prefect deployment run train-ctr` from a served
deployment; both are this one flow.
"""

from __future__ import annotations

import sys
from functools import partial

from flows.parameters import TrainParameters

if __name__ == "__main__":
    # Before Prefect is loaded, so that --help and a wrong value are answered at once.
    from flows.command_line import main

    sys.exit(main("flows.train_ctr", TrainParameters))

from prefect import State, flow
from prefect.runtime import flow_run as current_flow_run
from prefect.states import Cancelled, Completed

from flows import PROJECT_LOGGERS
from flows.night.plan import end_with_plan, plan_night
from flows.night.quality import plan_with_batch
from flows.night.run import begin_run, prepared
from flows.night.training import judge_and_record, train_night
from flows.parameter_model import takes
from flows.service.prefect_connection import name_flow_run
from flows.service.recovery import clean_up_after
from flows.service.schedule import TRAIN_CTR
from heterps_core.errors import RunStoppedError
from infra.workspace import Workspace
from tasks.recording import record_overhead
from tasks.records.mlflow_names import STOPPED
from tasks.records.past_runs import finished_run, note_skipped
from tasks.records.run_ids import new_run_id, utc_now
from tasks.running.live_fleet import only_fleet
from tasks.running.night_fleet import Replan
from tasks.running.progress import log_step
from tasks.running.run_lifecycle import clean_up_run
from tasks.running.run_log import kept_log


@flow(
    name=TRAIN_CTR,
    flow_run_name="{model}-{scheduler}",
    validate_parameters=False,
    on_failure=[clean_up_after("FAILED")],
    on_cancellation=[clean_up_after("KILLED")],
    on_crashed=[clean_up_after("KILLED")],
)
@takes(TrainParameters)
def train_ctr(asked: TrainParameters) -> str | State[str]:
    """Train a click model on machines that a proven plan chose, and record what it cost.

    Returns:
        The run's id; where the day is done already, the state Skipped with that of the run that did it. A run that
        was asked to stop ends as Stopped, and raises a RunStoppedError in its caller.
    """
    workspace = Workspace.locate().create()
    try:
        return _trained(workspace, asked)
    except RunStoppedError as stop:
        clean_up_run(
            workspace,
            str(current_flow_run.id),
            resume_run_id=asked.resume_run_id,
            status="KILLED",
            reason=f"{STOPPED}: {stop}",
        )
        return stopped_state(stop)


def stopped_state(stop: RunStoppedError) -> State[str]:
    """Return the state of a flow run that was asked to stop; who waits for it gets the error."""
    return Cancelled(name=STOPPED.capitalize(), message=str(stop), data=stop)


def _trained(workspace: Workspace, asked: TrainParameters) -> str | State[str]:
    started_at = utc_now()
    run_id = asked.resume_run_id or new_run_id(current_flow_run.id, now=utc_now())
    is_resumed = asked.resume_run_id is not None
    if not is_resumed and (table := asked.source.table) is not None:
        # Appends from now on change nothing, and the run's parameters name the snapshot.
        asked = asked.model_copy(update={"snapshot": table.snapshot_id})
    night = None if is_resumed else asked.source.night(asked.day)
    if night is not None:
        asked = asked.model_copy(update={"day": str(night.day)})
    begin = partial(begin_run, workspace, asked, night, run_id=run_id, is_resumed=is_resumed)
    if asked.plan_only:
        with kept_log(workspace, run_id, loggers=PROJECT_LOGGERS):
            end_with_plan(*plan_with_batch(begin()))
        return run_id

    max_wait_s = asked.max_wait_minutes * 60
    with only_fleet(workspace, run_id, flow_run_id=str(current_flow_run.id), max_wait_s=max_wait_s):
        if night is not None and not asked.again:
            done = {"day": str(night.day), "data": asked.source.name, "model": asked.sized_model}
            earlier = finished_run(workspace, **done)
            if earlier is not None:
                name_flow_run(asked.name_of(run_id))
                note_skipped(workspace, earlier, at=started_at)
                message = f"run {earlier} has trained {asked.sized_model} on {night.day} of {asked.data}"
                log_step("skipped", f"{message}; again=True trains once more")
                return Completed(name="Skipped", message=message, data=earlier)
        with kept_log(workspace, run_id, loggers=PROJECT_LOGGERS):
            begun = begin()
            with prepared(begun):
                run, plan = plan_with_batch(begun)
                without: frozenset[str] = frozenset()
                while isinstance(training := train_night(run, plan), Replan):
                    # Available machines and their prices may have changed.
                    without |= training.without
                    run = begin(is_resumed=True)
                    plan = plan_night(run, without=without)
            record_overhead(workspace, run.tracked, run.directory, started_at=started_at)
            judge_and_record(run, plan, training)
        return run_id
