"""Ends what a flow run has left, whatever ended the flow run."""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow

from infra.workspace import Workspace
from tasks.records.runs import clean_up_run
from tasks.records.tracked_run import EndStatus


def clean_up_after(status: EndStatus) -> Any:
    """Return a hook that ends machines by run id and closes the record with `status`."""

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
