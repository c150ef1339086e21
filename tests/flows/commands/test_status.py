import argparse
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest

from flows.cli import main
from flows.commands.status import run
from infra.ledger.ledger import Ledger
from infra.workspace import ServiceAddresses, Workspace
from tasks.records import mlflow_store
from tasks.records.mlflow_names import DAY_TAG
from tasks.records.past_runs import past_trainings
from tasks.records.record_outbox import Write
from tasks.running import run_lifecycle
from tests.infra.builders import offer, plan


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))
    for name in ("PREFECT_API_URL", "HETERPS_TRACKING_URI", "HETERPS_TIMEZONE"):
        monkeypatch.delenv(name, raising=False)
    return Workspace.locate()


@pytest.fixture
def status(monkeypatch, capsys):
    def ask(*arguments):
        monkeypatch.setattr("sys.argv", ["heterps", "status", *arguments])
        return main(), capsys.readouterr()

    return ask


@pytest.mark.usefixtures("workspace")
def test_an_empty_workspace_has_nothing_and_stays_empty(status, tmp_path):
    code, printed = status()

    assert code == 0
    assert "Machines\n  none" in printed.out
    assert printed.out.count("down     ") == 3
    assert "none is scheduled; 04:30 UTC once make serve runs" in printed.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("now", "month_usd"),
    [
        (datetime(2026, 7, 15, 12, tzinfo=UTC), 1.0),
        (datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC), 1.0),
        # By hand: of its 1,000 seconds 60 fall into the month that has just begun.
        (datetime(2026, 8, 1, 0, 1, tzinfo=UTC), 0.06),
        (datetime(2027, 1, 1, 0, 1, tzinfo=UTC), 0.06),
        (datetime(2026, 8, 1, tzinfo=UTC), 0.0),
    ],
    ids=["amid a month", "at its end", "at its start", "at the start of a year", "at its first instant"],
)
def test_machines_runs_and_waiting_records_show_while_every_server_is_down(workspace, capsys, now, month_usd):
    workspace.create()
    # What a supervisor that was killed leaves behind.
    addresses = ServiceAddresses(
        prefect_url="http://127.0.0.1:1", mlflow_url="http://127.0.0.1:1", supervisor_pid=os.getpid()
    )
    workspace.write_services(addresses)
    ledger, (request,) = Ledger(workspace.ledger_path), plan(offer(price_usd_per_hour=3.6)).node_requests()
    launched_at = now - timedelta(seconds=1_000)
    ledger.intend("r1", "local", request, at=launched_at)
    ledger.launched("r1", request.node_id, provider_instance_id="i-1", at=launched_at)
    run_lifecycle.open_run(workspace, run_id="r1", run_name="ctrdnn exact r1", tags={})
    mlflow_store.outbox(workspace).keep(Write(call="set_tag", run_id="x"))

    run(argparse.Namespace(json=True, watch=None), now=now)

    found = json.loads(capsys.readouterr().out)
    [machine] = found["machines"]
    assert (machine["run_id"], machine["provider"]) == ("r1", "local")
    # 3.6 USD an hour are 0.001 a second.
    assert machine["usd"] == pytest.approx(1.0)
    assert found["month_usd"]["local"] == pytest.approx(month_usd)
    assert [record["run_id"] for record in found["open_records"]] == ["r1"]
    assert found["flow_runs"] is None
    assert found["caps"] is None
    assert found["num_waiting_records"] == 1
    run(argparse.Namespace(json=False, watch=None), now=now)
    text = capsys.readouterr().out
    assert "16 min 40 s" in text
    assert "not known from Prefect, whose server does not answer" in text
    assert "1 wait for MLflow to answer" in text
    assert "starting, 1.000000 USD so far" in text


def test_a_store_that_does_not_answer_is_said_and_the_rest_is_shown(workspace, status, monkeypatch):
    monkeypatch.setattr("tasks.records.mlflow_store.READ_TIMEOUT_S", 0.1)
    workspace.create()
    mlflow_store.make_store(workspace)
    with closing(sqlite3.connect(workspace.tracking_path)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        code, printed = status()

    assert code == 0
    assert "not known from MLflow, whose store does not answer" in printed.out
    assert "not known: the record of runs does not answer" in printed.out


def test_runs_in_the_record_are_read_as_mlflow_tells_them(workspace, monkeypatch):
    workspace.create()
    client = mlflow_store.client_of(workspace)
    for number in range(4):
        tracked = run_lifecycle.open_run(
            workspace,
            run_id=f"r{number}",
            run_name=f"ctrdnn r{number}",
            tags={DAY_TAG: f"2026-01-0{number % 2 + 1}"},
        )
        client.log_param(tracked.mlflow_run_id, "model", "ctrdnn")
        for step in range(2):
            client.log_metric(tracked.mlflow_run_id, "quality/auc", 0.75 + step, step=step)
        if number == 1:
            client.delete_run(tracked.mlflow_run_id)
        if number == 2:
            run_lifecycle.close_run(workspace, tracked, status="FAILED", reason="a bad row")
    asked = [{"most": 9}, {"most": 1}, {"most": 9, "status": "RUNNING"}, {"most": 9, "day": "2026-01-01"}]

    from_database = [past_trainings(workspace, **terms) for terms in asked]

    monkeypatch.setattr(Workspace, "has_own_tracking", False)
    assert from_database == [past_trainings(workspace, **terms) for terms in asked]
    assert [len(found) for found in from_database] == [3, 1, 2, 2]


@pytest.mark.parametrize("command", ["status", "runs", "champion"])
def test_what_is_asked_each_day_is_shown_without_loading_prefect_mlflow_or_torch(workspace, command):
    run_lifecycle.open_run(workspace.create(), run_id="r1", run_name="ctrdnn exact r1", tags={})
    program = f"""
import sys
from flows.cli import main
assert main([{command!r}]) == 0
assert not {{"prefect", "mlflow", "torch", "boto3"}} & sys.modules.keys()
"""

    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_a_damaged_ledger_is_one_line(workspace, status):
    workspace.create()
    workspace.ledger_path.write_text("no database" * 200)

    code, printed = status()

    assert code == 2
    assert printed.err.startswith("heterps: error: the ledger must be a database")


def test_a_watch_shows_the_status_again_until_it_is_interrupted(workspace, status, monkeypatch):
    waits = []

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("flows.commands.status.time.sleep", wait)

    code, printed = status("--watch", "5")

    assert (code, waits) == (0, [5, 5])
    assert printed.out.count(f"Workspace {workspace.root}\n") == 2
