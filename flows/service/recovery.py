"""Cleans up after a killed service or flow run: in a serving process when it begins, or in a hook.

Prefect's server keeps runs as they were: pending where their process never started, running where it was killed, and
all nights that fell due meanwhile.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psutil
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.states import Crashed, Scheduled

from flows.service.prefect_connection import HEARTBEAT_SECONDS
from flows.service.prefect_plugin import FLOW_RUN_VARIABLE
from flows.service.schedule import DEPLOYMENTS
from infra.workspace import Workspace
from tasks.records.mlflow_names import EndStatus
from tasks.running.run_lifecycle import clean_up_run

HEARTBEAT_AUTOMATION = "crash runs without heartbeat"
HEARTBEATS_MISSED = 3

START_AUTOMATION = "crash runs that do not start"
STARTS_WITHIN_S = 600
"""A process starts in seconds; a worker that is busy takes a run before it calls it pending."""

_ENDED = [f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")]
_HEARTBEAT, _RUNNING, _PENDING = (f"prefect.flow-run.{name}" for name in ("heartbeat", "Running", "Pending"))

_ENGINE = ["-m", "prefect.engine"]

logger = logging.getLogger(__name__)


def install_crash_automations() -> None:
    """Make the server call a run crashed that does not start, or whose heartbeats stop; may be called again.

    A self-hosted server leaves the run of a killed process as it is for ever otherwise.
    """
    silence_s = HEARTBEATS_MISSED * HEARTBEAT_SECONDS
    for name, after, expect, within_s in (
        (HEARTBEAT_AUTOMATION, [_RUNNING, _HEARTBEAT], [_HEARTBEAT, *_ENDED], silence_s),
        (START_AUTOMATION, [_PENDING], [_RUNNING, *_ENDED], STARTS_WITHIN_S),
    ):
        message = f"its process gave no sign of life for {within_s} s"
        trigger = {
            "posture": "Proactive",
            "match": {"prefect.resource.id": ["prefect.flow-run.*"]},
            "for_each": ["prefect.resource.id"],
            "after": after,
            "expect": expect,
            "threshold": 1,
            "within": within_s,
        }
        actions = [{"type": "change-flow-run-state", "state": "CRASHED", "message": message}]
        wanted = Automation.model_validate({"name": name, "trigger": trigger, "actions": actions})
        with get_client(sync_client=True) as client:
            existing = client.read_automations_by_name(name)
        if existing:
            wanted.id = existing[0].id
            wanted.update()
        else:
            wanted.create()


def recover(*, is_alone: bool) -> None:
    """Bring runs that fell due or began before a serving process was killed to an end or a new beginning.

    - Scheduled, not asked for by a person: deleted, as Prefect would start all of them at once.
    - Pending: begins now; it has launched nothing.
    - Running without a process: crashed. The automations miss those of whom nothing was heard before the server was
      killed too. The sweeper ends their machines and closes their records.

    Only the first is done where not all runs are started by this process.
    """
    living = _runs_with_process()
    now = datetime.now(UTC).isoformat()
    wanted = {
        "deployments": {"name": {"any_": list(DEPLOYMENTS)}},
        "flow_runs": {
            "expected_start_time": {"before_": now},
            "state": {"type": {"any_": ["SCHEDULED", "PENDING", "RUNNING", "CANCELLING"]}},
        },
    }
    with get_client(sync_client=True) as client:
        for run in client.request("POST", "/flow_runs/filter", json=wanted).json():
            flow_run_id, state = UUID(run["id"]), run["state_type"]
            if state == "SCHEDULED" and run["auto_scheduled"]:
                client.delete_flow_run(flow_run_id)
                logger.warning("skipped %s, which fell due while nothing was serving", run["name"])
            elif state == "PENDING" and is_alone:
                client.set_flow_run_state(flow_run_id, Scheduled())
                logger.warning(
                    "%s was about to start when the service was killed; it begins now", run["name"]
                )
            elif state in ("RUNNING", "CANCELLING") and is_alone and run["id"] not in living:
                crashed: State[None] = Crashed(message="its process was killed with the service")
                client.set_flow_run_state(flow_run_id, crashed, force=True)
                logger.warning("%s was killed with the service", run["name"])


def clean_up_after(status: EndStatus) -> Any:
    """Return a hook of a flow that ends the machines of its run and closes the record with `status`."""

    def clean_up(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
        reason = f"{state.name}: {(state.message or 'no message').splitlines()[0]}"
        clean_up_run(
            Workspace.locate(),
            str(flow_run.id),
            resume_run_id=flow_run.parameters.get("resume_run_id"),
            status=status,
            reason=reason,
        )

    return clean_up


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
