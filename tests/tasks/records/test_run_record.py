"""Records while MLflow's store is away: a database that another process locks, and a real server that is stopped."""

import json
import sqlite3
import threading
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from mlflow import MlflowClient

from heterps_core.errors import ConfigurationError
from infra.workspace import Workspace
from tasks.records import tracking
from tasks.records.run_record import (
    deliver,
    note,
    note_file,
    note_metrics,
    note_series,
    refused_records,
    waiting_records,
)
from tasks.running.run_lifecycle import close_run, open_run
from tests.tasks.builders import make_problem, make_result
from tests.tracking_server import TrackingServer

SETTINGS = {"method": "exact"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One store for the tests that lock nothing, as MLflow takes seconds to write its tables."""
    return Workspace(root=tmp_path_factory.mktemp("home")).create()


def open_night(workspace, run_id):
    return open_run(workspace, run_id=run_id, run_name=run_id, tags={})


def note_night(workspace, run):
    """Note a whole night: two figures, a curve, a search and two documents."""
    note_metrics(workspace, run, {"quality/auc": 0.75})
    note_series(workspace, run, {"train/log_loss": [(1, 0.7), (2, 0.6)]})
    tracking.record_search(workspace, run, make_result(make_problem()), SETTINGS, name="search exact")
    note(workspace, run, name="a night", tags={"heterps.speed": "{}"}, parameters=SETTINGS)
    note_file(workspace, run.run_id, "report.txt", "the report")
    note_file(workspace, run.run_id, "bills/first.json", {"usd": 1.25})


def assert_is_recorded_once(client, run):
    recorded = client.get_run(run.mlflow_run_id)
    assert recorded.info.status == "FINISHED"
    assert recorded.info.run_name == "a night"
    assert recorded.data.tags["heterps.end_reason"] == "completed"
    assert recorded.data.params == SETTINGS
    for name, values in {"quality/auc": [0.75], "train/log_loss": [0.7, 0.6]}.items():
        assert [point.value for point in client.get_metric_history(run.mlflow_run_id, name)] == values
    [child] = client.search_runs([run.experiment_id], f"tags.`mlflow.parentRunId` = '{run.mlflow_run_id}'")
    assert (child.info.run_name, child.info.status) == ("search exact", "FINISHED")
    history = client.get_metric_history(child.info.run_id, "search/best_cost_usd")
    assert {point.step: point.value for point in history} == pytest.approx({1: 0.0036, 7: 0.0009})
    assert {file.path for file in client.list_artifacts(run.mlflow_run_id)} == {"report.txt", "bills"}


def test_a_record_is_written_at_the_end_of_its_run_and_then_deleted_here(shared):
    run = open_night(shared, "whole")
    note_night(shared, run)
    assert MlflowClient(shared.tracking_uri).get_run(run.mlflow_run_id).data.metrics == {}

    close_run(shared, run, status="FINISHED", reason="completed")

    assert_is_recorded_once(MlflowClient(shared.tracking_uri), run)
    assert not (shared.records_directory / "whole").exists()


def test_a_delivery_that_was_killed_is_repeated_without_a_second_search_or_figure(shared):
    run = open_night(shared, "killed")
    note_night(shared, run)
    before_end = (shared.records_directory / "killed" / "notes.jsonl").read_text()
    close_run(shared, run, status="FINISHED", reason="completed")
    folder = shared.records_directory / "killed"
    folder.mkdir()
    (folder / "notes.jsonl").write_text(before_end)

    assert deliver(shared, "killed")

    assert_is_recorded_once(MlflowClient(shared.tracking_uri), run)


def test_a_line_that_a_kill_cut_short_costs_that_line_alone(shared):
    run = open_night(shared, "cut")
    note_metrics(shared, run, {"first": 1.0})
    with (shared.records_directory / "cut" / "notes.jsonl").open("a") as lines:
        lines.write('{"run": {"mlflow_run')
    note_metrics(shared, run, {"second": 2.0})

    close_run(shared, run, status="FINISHED", reason="completed")

    found = MlflowClient(shared.tracking_uri).get_run(run.mlflow_run_id)
    assert found.data.metrics == {"first": 1.0, "second": 2.0}


def test_a_record_that_mlflow_refuses_is_set_aside_and_keeps_none_after_it(shared):
    run = open_night(shared, "wrong")
    note_metrics(shared, run, {"a name: with * signs": 1.0})

    close_run(shared, run, status="FINISHED", reason="completed")

    assert (waiting_records(shared), refused_records(shared)) == ([], ["wrong"])


def test_two_deliveries_at_once_write_a_search_once(shared):
    run = open_night(shared, "twice")
    note_night(shared, run)
    note(shared, run, tags={"heterps.end_reason": "completed"}, end=["FINISHED", 1_800_000_000_000])

    threads = [threading.Thread(target=deliver, args=(shared, "twice")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert_is_recorded_once(MlflowClient(shared.tracking_uri), run)


@contextmanager
def write_lock(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        yield
        holder.execute("ROLLBACK")


def test_a_run_goes_on_while_its_database_is_locked_and_nothing_is_lost(tmp_path, quick_locks):
    workspace = Workspace(root=tmp_path).create()
    run = open_night(workspace, "r1")
    with write_lock(workspace.tracking_path):
        note_night(workspace, run)
        close_run(workspace, run, status="FINISHED", reason="completed")
        assert waiting_records(workspace) == ["r1"]

    assert deliver(workspace, "r1")

    assert_is_recorded_once(MlflowClient(workspace.tracking_uri), run)
    assert waiting_records(workspace) == []


def test_a_record_that_no_store_took_for_a_week_is_set_aside(tmp_path, quick_locks):
    workspace = Workspace(root=tmp_path).create()
    run = open_night(workspace, "r1")
    note(workspace, run, end=["FINISHED", 1_000_000_000_000])

    with write_lock(workspace.tracking_path):
        assert deliver(workspace, "r1")

    [notes] = (workspace.records_directory / "refused" / "r1").glob("*.jsonl")
    assert json.loads(notes.read_text())["end"] == ["FINISHED", 1_000_000_000_000]


@pytest.mark.weekly
def test_a_server_that_is_stopped_in_mid_run_gets_everything_when_it_is_back(tmp_path, monkeypatch):
    server = TrackingServer(tmp_path)
    try:
        monkeypatch.setenv("HETERPS_TRACKING_URI", server.url)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        workspace = Workspace(root=tmp_path / "home").create()
        run = open_night(workspace, "r1")
        server.stop()
        note_night(workspace, run)
        close_run(workspace, run, status="FINISHED", reason="completed")
        with pytest.raises(ConfigurationError, match=r"must answer, but does not.*HETERPS_TRACKING_URI"):
            open_night(workspace, "r2")
        assert not deliver(workspace, "r1")
        server.start()

        assert deliver(workspace, "r1")

        client = MlflowClient(server.url)
        assert_is_recorded_once(client, run)
        document = client.download_artifacts(run.mlflow_run_id, "bills/first.json", str(tmp_path))
        assert json.loads(Path(document).read_text()) == {"usd": 1.25}
    finally:
        server.stop()
