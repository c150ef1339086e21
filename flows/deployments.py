"""The serving process: runs `train-ctr` and `sweep-orphans` on schedule, all of them on request.

`python -m flows.serve` starts it, and a team's server runs it beside its own Prefect. It must be its own main module,
as flow runs that are served from an imported one stay pending for ever. Where workers run the deployments of
prefect.yaml, `python -m flows.deployments --set-up-only` installs what they need beside it.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from prefect import serve
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import (
    ConcurrencyLimitConfig,
    ConcurrencyLimitStrategy,
    FlowRun,
    StateType,
)
from prefect.deployments.runner import RunnerDeployment
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.flows import EntrypointType, Flow
from prefect.schedules import Cron, Interval
from prefect.settings import PREFECT_API_URL
from prefect.states import Scheduled

from flows.backfill_ctr import backfill_ctr
from flows.compare_schedulers import compare_schedulers
from flows.parameter_checks import check_parameters
from flows.prefect_connection import HEARTBEAT_SECONDS
from flows.profile_devices import profile_devices
from flows.refresh_prices import refresh_prices
from flows.schedule import (
    BACKFILL_CTR,
    COMPARE_SCHEDULERS,
    NIGHTLY_CRON,
    NIGHTLY_VARIABLE,
    PROFILE_DEVICES,
    REFRESH_PRICES,
    SWEEP_INTERVAL_S,
    SWEEP_ORPHANS,
    TRAIN_CTR,
    nightly_parameters,
    nightly_timezone,
)
from flows.sweep_orphans import sweep_orphans
from flows.train_ctr import train_ctr
from heterps_core.errors import HeterpsError, UnknownNameError
from infra.workspace import answers

HEARTBEAT_AUTOMATION = "crash runs without heartbeat"
HEARTBEATS_MISSED = 3

START_AUTOMATION = "crash runs that do not start"
STARTS_WITHIN = timedelta(minutes=10)
"""A process starts in seconds; a worker that is busy takes a run before it calls it pending."""

SERVER_TIMEOUT_S = 80.0
"""The server is started at the same time, and writes its tables at its first start."""

SERVER_POLL_S = 0.2

logger = logging.getLogger(__name__)

# A second run while one is live would rent a second fleet, so it is refused and not queued.
ONE_AT_A_TIME = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)


def main(arguments: Sequence[str] | None = None) -> int:
    """Register the deployments and run what they are asked for, until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m flows.deployments", description=main.__doc__)
    parser.add_argument(
        "--set-up-only",
        action="store_true",
        help="install the automations that call dead runs crashed, drop runs that were missed, and end",
    )
    options = parser.parse_args(arguments)
    try:
        checked_nightly_parameters()
        wait_for_server()
        install_crash_automations()
        skip_missed_runs()
        if not options.set_up_only:
            start_again()
            # Schedules stay as they are on a stop, so that one which somebody paused stays paused.
            serve(*deployments(), pause_on_shutdown=False, print_starting_message=False)
    except HeterpsError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def wait_for_server() -> None:
    """Return once the Prefect server answers, or after `SERVER_TIMEOUT_S`, when the next call says why not."""
    deadline = time.monotonic() + SERVER_TIMEOUT_S
    api_url = PREFECT_API_URL.value()
    while (
        api_url and not answers(f"{api_url}/health", timeout_s=SERVER_POLL_S) and time.monotonic() < deadline
    ):
        time.sleep(SERVER_POLL_S)


def deployments() -> tuple[RunnerDeployment, ...]:
    """Return the nightly training, the sweeper, and what runs on request only, each named as its flow."""
    nightly = Cron(NIGHTLY_CRON, timezone=nightly_timezone())
    return (
        deployment(train_ctr, TRAIN_CTR, schedule=nightly, parameters=checked_nightly_parameters()),
        deployment(sweep_orphans, SWEEP_ORPHANS, schedule=Interval(SWEEP_INTERVAL_S)),
        deployment(compare_schedulers, COMPARE_SCHEDULERS),
        deployment(refresh_prices, REFRESH_PRICES),
        deployment(profile_devices, PROFILE_DEVICES),
        deployment(backfill_ctr, BACKFILL_CTR),
    )


def deployment(
    flow: Flow[..., Any],
    name: str,
    *,
    schedule: Cron | Interval | None = None,
    parameters: dict[str, Any] | None = None,
) -> RunnerDeployment:
    """Return the deployment of a flow, which runs once at a time."""
    return flow.to_deployment(
        name=name,
        parameters=parameters,
        schedule=schedule,
        concurrency_limit=ONE_AT_A_TIME,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


def checked_nightly_parameters() -> dict[str, Any]:
    """Return the parameters of the nightly training that the environment sets.

    The data is looked for by each night and not here, as a folder may come later than the service.

    Raises:
        UnknownNameError: train-ctr has no such parameter.
        ConfigurationError: See `flows.parameter_checks.check_parameters`.
    """
    known = {name: each.default for name, each in inspect.signature(train_ctr.fn).parameters.items()}
    parameters = nightly_parameters()
    for name in parameters:
        if name not in known:
            raise UnknownNameError(f"parameter of train-ctr in {NIGHTLY_VARIABLE}", name, known)
    check_parameters(**(known | parameters | {"data": None, "schema_file": None, "day": None}))
    return parameters


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

    They have launched nothing, and as one runs at a time there is at most one of each deployment. Nothing else may
    be starting runs: this is for a serving process that begins, and not for a server with workers.
    """
    with get_client(sync_client=True) as client:
        unstarted = client.read_flow_runs(
            deployment_filter=DeploymentFilter(
                name=DeploymentFilterName(any_=[each.name for each in deployments()])
            ),
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PENDING]))
            ),
        )
        for run in unstarted:
            client.set_flow_run_state(run.id, Scheduled())
            logger.warning("%s was about to start when the service was killed; it begins now", run.name)
    return len(unstarted)


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


if __name__ == "__main__":
    sys.exit(main())
