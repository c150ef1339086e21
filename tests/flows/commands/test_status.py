import json
import os
from datetime import UTC, datetime, timedelta

import pytest

from flows.cli import main
from heterps_core.errors import ConfigurationError
from infra.ledger import Ledger
from infra.workspace import ServiceAddresses, Workspace
from tasks import mlflow_store, run_lifecycle
from tasks.record_outbox import Write
from tests.infra.builders import offer, plan


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))
    for name in ("PREFECT_API_URL", "HETERPS_TRACKING_URI", "HETERPS_TIMEZONE"):
        monkeypatch.delenv(name, raising=False)
    return Workspace.locate()


@pytest.fixture
def status(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["heterps", "status", *arguments])
        return main(), capsys.readouterr()

    return run


@pytest.mark.usefixtures("workspace")
def test_an_empty_workspace_has_nothing_and_stays_empty(status, tmp_path):
    code, printed = status()

    assert code == 0
    assert "Machines\n  none" in printed.out
    assert printed.out.count("down     ") == 3
    assert "none is scheduled; 04:30 UTC once make serve runs" in printed.out
    assert list(tmp_path.iterdir()) == []


def test_machines_runs_and_waiting_records_show_while_every_server_is_down(workspace, status):
    workspace.create()
    # What a supervisor that was killed leaves behind.
    addresses = ServiceAddresses(
        prefect_url="http://127.0.0.1:1", mlflow_url="http://127.0.0.1:1", supervisor_pid=os.getpid()
    )
    workspace.write_services(addresses)
    ledger, (request,) = Ledger(workspace.ledger_path), plan(offer(price_usd_per_hour=3.6)).node_requests()
    launched_at = datetime.now(UTC) - timedelta(seconds=1_000)
    ledger.intend("r1", "local", request, at=launched_at)
    ledger.launched("r1", request.node_id, provider_instance_id="i-1", at=launched_at)
    run_lifecycle.open_run(workspace, run_id="r1", run_name="ctrdnn exact r1", tags={})
    mlflow_store.outbox(workspace).keep(Write(call="set_tag", run_id="x"))

    code, printed = status("--json")

    found = json.loads(printed.out)
    assert code == 0
    [machine] = found["machines"]
    assert (machine["run_id"], machine["provider"]) == ("r1", "local")
    # 3.6 USD an hour are 0.001 a second.
    assert machine["usd"] == pytest.approx(1.0, abs=0.05)
    assert found["month_usd"]["local"] == pytest.approx(machine["usd"], abs=0.01)
    assert [run["run_id"] for run in found["open_records"]] == ["r1"]
    assert found["flow_runs"] is None
    assert found["caps"] is None
    assert found["num_waiting_records"] == 1
    _, text = status()
    assert "16 min" in text.out
    assert "not known from Prefect, whose server does not answer" in text.out
    assert "1 wait for MLflow to answer" in text.out


def test_a_store_that_does_not_answer_is_said_and_the_rest_is_shown(workspace, status, monkeypatch):
    def refuse(workspace, *, most):
        raise ConfigurationError("away")

    workspace.create()
    monkeypatch.setattr("tasks.run_history.run_lines", refuse)

    code, printed = status()

    assert code == 0
    assert "not known from MLflow, whose store does not answer" in printed.out


def test_a_damaged_ledger_is_one_line(workspace, status):
    workspace.create()
    workspace.ledger_path.write_text("no database" * 200)

    code, printed = status()

    assert code == 2
    assert printed.err.startswith("heterps: error: the ledger must be a database")
