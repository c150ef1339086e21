"""Records while MLflow's store is away: a database that another process locks, and a real server that is stopped."""

import json
import sqlite3
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from mlflow import MlflowClient

from heterps_core.errors import ConfigurationError
from infra.workspace import Workspace
from tasks.records import mlflow_store, record_outbox, tracking
from tasks.records.record_outbox import GIVE_UP_AFTER_S, Outbox, Write
from tasks.running import run_lifecycle
from tests.tracking_server import TrackingServer


class StoreIsAwayError(OSError):
    """What a store that does not answer raises."""


def never(write):
    raise StoreIsAwayError("away")


def is_away(problem):
    return isinstance(problem, StoreIsAwayError)


@pytest.fixture
def box(tmp_path):
    return Outbox(tmp_path / "outbox")


def write(number, **values):
    return Write(call="set_tag", run_id="r", arguments={"number": number}, **values)


def numbers(writes):
    return [one.arguments["number"] for one in writes]


def test_what_waits_is_delivered_in_order_and_once(box):
    for number in range(3):
        box.keep(write(number))
    done = []

    assert box.deliver(done.append, is_passing=is_away) == 3
    assert box.deliver(done.append, is_passing=is_away) == 0
    assert numbers(done) == [0, 1, 2]
    assert box.is_empty


def test_a_store_that_goes_away_again_leaves_the_rest_in_order(box):
    for number in range(4):
        box.keep(write(number))
    done = []

    def away_at_two(one):
        if one.arguments["number"] == 2:
            never(one)
        done.append(one)

    assert box.deliver(away_at_two, is_passing=is_away) == 2
    assert numbers(box.waiting()) == [2, 3]
    assert not box.is_due


def test_a_write_that_is_wrong_is_set_aside_and_keeps_none_behind_it(box):
    box.keep(write(0))
    box.keep(write(1))
    done = []

    def wrong_at_zero(one):
        if one.arguments["number"] == 0:
            raise ValueError("no such run")
        done.append(one)

    box.deliver(wrong_at_zero, is_passing=is_away)

    assert (numbers(done), box.is_empty, box.num_refused()) == ([1], True, 1)
    [refused] = map(json.loads, (box.folder / "refused.jsonl").read_text().splitlines())
    assert refused["problem"] == "no such run"


def test_what_no_store_took_for_a_week_is_set_aside(box):
    box.keep(write(0, written_at=time.time() - GIVE_UP_AFTER_S - 1))

    box.deliver(never, is_passing=is_away)

    assert (box.is_empty, box.num_refused()) == (True, 1)


def test_a_line_that_a_kill_cut_short_costs_that_line_alone(box):
    box.keep(write(0))
    with (box.folder / "waiting.jsonl").open("a") as lines:
        lines.write('{"call": "set_tag", "run_')
    box.keep(write(2))

    assert numbers(box.waiting()) == [0, 2]


def test_a_file_is_kept_until_it_is_delivered(box, tmp_path):
    original = tmp_path / "plan.json"
    original.write_text("{}")
    box.keep(Write(call="log_artifact", run_id="r", path=str(original)))
    original.unlink()
    found = []

    box.deliver(lambda one: found.append(Path(one.path).read_text()), is_passing=is_away)

    assert found == ["{}"]
    assert list((box.folder / "files").rglob("*.json")) == []


@contextmanager
def write_lock(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        yield
        holder.execute("ROLLBACK")


@pytest.fixture
def quick_locks(monkeypatch):
    """MLflow waits 20 s for a lock; the wait is not what is tested."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    def shorten(connection, cursor, statement, parameters, context, many):
        return statement.replace("busy_timeout = 20000", "busy_timeout = 200"), parameters

    event.listen(Engine, "before_cursor_execute", shorten, retval=True)
    yield
    event.remove(Engine, "before_cursor_execute", shorten)


def test_a_run_goes_on_while_its_database_is_locked_and_nothing_is_lost(tmp_path, monkeypatch, quick_locks):
    workspace = Workspace(root=tmp_path).create()
    run = run_lifecycle.open_run(workspace, run_id="r1", run_name="r1", tags={})
    monkeypatch.setattr(record_outbox, "RETRY_AFTER_S", 0.0)
    with write_lock(workspace.tracking_path):
        # Even a run that begins in this time does.
        second = run_lifecycle.open_run(workspace, run_id="r2", run_name="r2", tags={})
        tracking.record_metrics(workspace, run, {"quality/auc": 0.75})
        tracking.record_series(workspace, second, {"train/log_loss": [(1, 0.7), (2, 0.6)]})
        mlflow_store.client_of(workspace).log_text(run.mlflow_run_id, "the report", "report.txt")
        run_lifecycle.close_run(workspace, run, status="FINISHED", reason="completed")
        assert mlflow_store.outbox(workspace).waiting()

    assert mlflow_store.deliver_waiting(workspace)

    client = MlflowClient(workspace.tracking_uri)
    first = client.get_run(run.mlflow_run_id)
    assert first.info.status == "FINISHED"
    assert first.data.metrics == {"quality/auc": 0.75}
    assert first.data.tags["heterps.end_reason"] == "completed"
    [late] = client.search_runs([run.experiment_id], filter_string="tags.`heterps.run_id` = 'r2'")
    history = client.get_metric_history(late.info.run_id, "train/log_loss")
    assert [(point.step, point.value) for point in history] == [(1, 0.7), (2, 0.6)]
    # Its process goes on under the id that stood for it.
    tracking.record_metrics(workspace, second, {"quality/auc": 0.5})
    assert client.get_run(late.info.run_id).data.metrics["quality/auc"] == 0.5


def test_a_delivery_that_was_killed_is_repeated_without_a_second_run_or_figure(
    tmp_path, monkeypatch, quick_locks
):
    workspace = Workspace(root=tmp_path).create()
    first = run_lifecycle.open_run(workspace, run_id="r1", run_name="r1", tags={})
    with write_lock(workspace.tracking_path):
        second = run_lifecycle.open_run(workspace, run_id="r2", run_name="r2", tags={})
        tracking.record_series(workspace, second, {"loss": [(1, 0.7)]})
    box = mlflow_store.outbox(workspace)
    waiting = (box.folder / "waiting.jsonl").read_text()
    assert mlflow_store.deliver_waiting(workspace)
    (box.folder / "waiting.jsonl").write_text(waiting)
    (box.folder / "created.json").unlink()

    assert mlflow_store.deliver_waiting(workspace)

    client = MlflowClient(workspace.tracking_uri)
    [late] = client.search_runs([first.experiment_id], filter_string="tags.`heterps.run_id` = 'r2'")
    assert len(client.get_metric_history(late.info.run_id, "loss")) == 1


@pytest.mark.slow
def test_a_server_that_is_stopped_in_mid_run_gets_everything_when_it_is_back(tmp_path, monkeypatch):
    server = TrackingServer(tmp_path)
    try:
        monkeypatch.setenv("HETERPS_TRACKING_URI", server.url)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        workspace = Workspace(root=tmp_path / "home").create()
        run = run_lifecycle.open_run(workspace, run_id="r1", run_name="r1", tags={})
        tracking.record_metrics(workspace, run, {"predicted/cost_usd": 1.0})
        server.stop()
        tracking.record_metrics(workspace, run, {"measured/cost_usd": 1.25})
        mlflow_store.client_of(workspace).log_dict(run.mlflow_run_id, {"usd": 1.25}, "bill.json")
        run_lifecycle.close_run(workspace, run, status="FINISHED", reason="completed")
        with pytest.raises(ConfigurationError, match=r"must answer, but does not.*HETERPS_TRACKING_URI"):
            run_lifecycle.open_run(workspace, run_id="r2", run_name="r2", tags={})
        assert not mlflow_store.deliver_waiting(workspace)
        server.start()

        assert mlflow_store.deliver_waiting(workspace)

        client = MlflowClient(server.url)
        recorded = client.get_run(run.mlflow_run_id)
        assert recorded.info.status == "FINISHED"
        assert recorded.data.metrics == {"predicted/cost_usd": 1.0, "measured/cost_usd": 1.25}
        document = client.download_artifacts(run.mlflow_run_id, "bill.json", str(tmp_path))
        assert Path(document).read_text() == '{\n  "usd": 1.25\n}'
    finally:
        server.stop()
