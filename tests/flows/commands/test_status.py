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
from tasks.records.mlflow_names import Tag, TrackedRun
from tasks.records.run_record import note
from tasks.running import run_lifecycle
from tests.infra.builders import offer, plan
from tests.tiers import weekly_after

pytestmark = pytest.mark.slow


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
    waits = TrackedRun(mlflow_run_id="0" * 32, experiment_id="1", run_id="r0")
    note(workspace, waits, end=["FINISHED", 1_800_000_000_000])

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


def record_run(workspace, run_id, *, is_alive=True, ended_as=None, reason=""):
    """A run's record; its process is this one, or one that is gone."""
    tracked = run_lifecycle.open_run(workspace, run_id=run_id, run_name=f"ctrdnn exact {run_id}", tags={})
    if not is_alive:
        mlflow_store.client_of(workspace).set_tag(tracked.mlflow_run_id, Tag.PROCESS, "2147483647 1.00")
    if ended_as is not None:
        run_lifecycle.close_run(workspace, tracked, status=ended_as, reason=reason)


def test_a_run_that_died_says_so_with_what_it_left_and_how_to_go_on(workspace, status, monkeypatch, capsys):
    workspace.create()
    ledger, (request,) = Ledger(workspace.ledger_path), plan(offer()).node_requests()
    ledger.intend("r1", "local", request, at=datetime.now(UTC))
    record_run(workspace, "r1", is_alive=False)
    record_run(workspace, "r2")

    text = status()[1].out

    [died] = [line.strip() for line in text.splitlines() if "died, with" in line]
    assert died.startswith("died, with 1 machines: its process is gone; heterps sweep ends the machines")
    assert died.endswith("resume_run_id=r1 goes on from its newest checkpoint")
    monkeypatch.setattr("sys.argv", ["heterps", "doctor"])
    main()
    doctor = capsys.readouterr().out
    assert "r1 died: its process is gone, its record is open" in doctor
    assert "heterps sweep   (then go on with resume_run_id=r1)" in doctor
    assert "r2 died" not in doctor


@pytest.mark.parametrize(
    ("ended_as", "reason", "shown"),
    [
        ("FINISHED", "completed", "r1 finished"),
        ("FAILED", "Failed: a worker died", "r1 failed: Failed: a worker died"),
        ("KILLED", "the process of the flow is gone", "r1 killed: the process of the flow is gone"),
        ("KILLED", "stopped: run r1 was asked to stop", "r1 stopped: run r1 was asked to stop"),
    ],
)
def test_how_the_last_run_ended_is_shown(workspace, status, ended_as, reason, shown):
    workspace.create()
    record_run(workspace, "r1", ended_as=ended_as, reason=reason)

    assert f"last run        {shown}" in status()[1].out
    assert json.loads(status("--json")[1].out)["last_run"]["outcome"] == shown.split()[1].strip(":")


def test_a_run_that_goes_on_has_no_reason_of_its_end(workspace, status):
    workspace.create()
    record_run(workspace, "r1", ended_as="FAILED", reason="Failed: a worker died")
    record_run(workspace, "r1")

    [record] = json.loads(status("--json")[1].out)["open_records"]
    assert (record["outcome"], record["end_reason"]) == ("running", None)


@pytest.mark.weekly
@pytest.mark.usefixtures("quick_locks")
def test_a_store_that_does_not_answer_is_said_and_the_rest_is_shown(workspace, status):
    workspace.create()
    mlflow_store._make_store(workspace)
    with closing(sqlite3.connect(workspace.tracking_path)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        code, printed = status()

    assert code == 0
    assert "not known from MLflow, whose store does not answer" in printed.out
    assert "not known: the record of runs does not answer" in printed.out


@pytest.mark.parametrize("command", weekly_after(1, ["status", "runs", "champion"]))
def test_a_daily_question_is_answered_without_loading_prefect_or_torch(workspace, command):
    run_lifecycle.open_run(workspace.create(), run_id="r1", run_name="ctrdnn exact r1", tags={})
    program = f"""
import sys
from flows.cli import main
assert main([{command!r}]) == 0
assert not {{"prefect", "torch", "boto3"}} & sys.modules.keys()
"""

    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_a_damaged_ledger_is_one_line(workspace, status):
    workspace.create()
    workspace.ledger_path.write_text("no database" * 200)

    code, printed = status()

    assert code == 2
    assert printed.err.startswith("heterps: error: the ledger must be a database")
