"""A run whose flow run is deleted in Prefect while it trains ends in one line, and leaves no machine."""

import pytest
from prefect.client.orchestration import get_client

from heterps_core.errors import ConfigurationError
from heterps_core.training.step_metrics import read_progress
from infra.ledger.ledger import EntryState, Ledger
from tests.flows.test_lost_machines import LIMIT_S, Run
from tests.waiting import wait_for

pytestmark = [pytest.mark.weekly, pytest.mark.timeout(600)]


def test_a_run_whose_flow_run_is_deleted_ends_in_one_line_and_leaves_no_machine(
    tmp_path, workspace_of_runs, clicks_of_runs, prefect_server
):
    run = Run(workspace_of_runs(tmp_path / "home"), str(clicks_of_runs))
    try:
        wait_for(lambda: read_progress(run.directory), timeout_s=LIMIT_S, what="the first training step")
        with get_client(sync_client=True) as client:
            for flow_run in client.read_flow_runs():
                client.delete_flow_run(flow_run.id)
        status, errors = run.end()
    finally:
        run.kill()

    [line] = errors.splitlines()
    assert line.startswith(
        "error: a flow run must stay in Prefect until its end, but this one was deleted there"
    )
    assert status == ConfigurationError("").exit_status
    assert not run.nodes()
    entries = Ledger(run.workspace.ledger_path).entries()
    assert {entry.state for entry in entries} == {EntryState.ENDED}
