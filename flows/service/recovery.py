"""What a killed service leaves behind in Prefect, and what a serving process does about it when it begins.

Prefect's server keeps runs as they were: pending where their process never started, running where it was killed, and
all nights that fell due meanwhile.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta

import psutil
from prefect.automations import Automation
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.states import Crashed, Scheduled

from flows.service.prefect_connection import HEARTBEAT_SECONDS
from flows.service.prefect_plugin import FLOW_RUN_VARIABLE
from flows.service.schedule import DEPLOYMENTS, SWEEP_ORPHANS, TRAIN_CTR

HEARTBEAT_AUTOMATION = "crash runs without heartbeat"
HEARTBEATS_MISSED = 3

START_AUTOMATION = "crash runs that do not start"
STARTS_WITHIN = timedelta(minutes=10)
"""A process starts in seconds; a worker that is busy takes a run before it calls it pending."""

_ENGINE = ["-m", "prefect.engine"]
"""How Prefect starts the process of a flow run."""

logger = logging.getLogger(__name__)


def install_crash_automations() -> None:
    """Make the server call a run crashed that does not start, or whose heartbeats stop; may be called again.

    A self-hosted server leaves the run of a killed process as it is for ever otherwise, and with it the only place
    that the concurrency limit grants.
    """
    ended = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
    heartbeat, running = "prefect.flow-run.heartbeat", "prefect.flow-run.Running"
    _install(
        HEARTBEAT_AUTOMATION,
        after={running, heartbeat},
        expect={heartbeat, *ended},
        within=timedelta(seconds=HEARTBEATS_MISSED * HEARTBEAT_SECONDS),
        message="no heartbeat",
    )
    _install(
        START_AUTOMATION,
        after={"prefect.flow-run.Pending"},
        expect={running, *ended},
        within=STARTS_WITHIN,
        message="its process did not start",
    )


def _install(name: str, *, after: set[str], expect: set[str], within: timedelta, message: str) -> None:
    """Install, or bring up to date, an automation that calls a run crashed of which nothing expected is heard."""
    wanted = Automation(
        name=name,
        description="Written by HeterPS at every start of the serving process.",
        trigger=EventTrigger(
            after=after,
            expect=expect,
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=within,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED, message=f"{message} for {within.total_seconds():.0f} s"
            )
        ],
    )
    with get_client(sync_client=True) as client:
        existing = client.read_automations_by_name(name)
    if not existing:
        wanted.create()
        return
    wanted.id = existing[0].id
    wanted.update()


def start_again() -> int:
    """Let runs begin now that were about to start when the serving process was killed; return how many.

    They have launched nothing. Nothing else may be starting runs: this is for a serving process that begins, and not
    for a server with workers.
    """
    with get_client(sync_client=True) as client:
        unstarted = _runs_in(client, StateType.PENDING)
        for run in unstarted:
            client.set_flow_run_state(run.id, Scheduled())
            logger.warning("%s was about to start when the service was killed; it begins now", run.name)
    return len(unstarted)


def end_gone_runs() -> int:
    """Call runs crashed whose process was killed with the service; return how many.

    The automations miss those of whom nothing was heard before the server was killed too. The sweeper ends their
    machines and closes their records. As for `start_again`, nothing else may run flows.
    """
    living = _runs_with_process()
    with get_client(sync_client=True) as client:
        gone = [
            run
            for run in _runs_in(client, StateType.RUNNING, StateType.CANCELLING)
            if str(run.id) not in living
        ]
        for run in gone:
            client.set_flow_run_state(
                run.id, Crashed(message="its process was killed with the service"), force=True
            )
            logger.warning("%s was killed with the service", run.name)
    return len(gone)


def skip_missed_runs() -> int:
    """Delete scheduled runs that fell due while nothing served them; return how many.

    Prefect would start all of them at once, oldest first. A run that a person asked for is kept.
    """
    with get_client(sync_client=True) as client:
        missed = client.read_flow_runs(
            deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[TRAIN_CTR, SWEEP_ORPHANS])),
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
                expected_start_time=FlowRunFilterExpectedStartTime(before_=datetime.now(UTC)),
            ),
        )
        skipped: list[FlowRun] = [run for run in missed if run.auto_scheduled]
        for run in skipped:
            client.delete_flow_run(run.id)
    if skipped:
        logger.warning("skipped %d scheduled runs that fell due while nothing was serving", len(skipped))
    return len(skipped)


def _runs_in(client: SyncPrefectClient, *states: StateType) -> list[FlowRun]:
    return client.read_flow_runs(
        deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=list(DEPLOYMENTS))),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(states)))
        ),
    )


def _runs_with_process() -> set[str]:
    """Return the ids of runs whose process lives on this machine; nodes that a run started have its variable too."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.cmdline()[1:3] == _ENGINE:
                found.add(process.environ().get(FLOW_RUN_VARIABLE, ""))
        except psutil.Error:
            continue
    return found
