import subprocess
import sys

import pytest
from mlflow import MlflowClient

from infra.workspace import Workspace
from tasks.records.mlflow_names import Kind, Tag
from tasks.running import run_lifecycle


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """One store for all tests here, as MLflow takes seconds to write its tables."""
    return Workspace(root=tmp_path_factory.mktemp("home")).create()


@pytest.fixture(scope="module")
def client(workspace):
    return MlflowClient(tracking_uri=workspace.tracking_uri)


def open_run(workspace, run_id):
    return run_lifecycle.open_run(workspace, run_id=run_id, run_name=run_id, tags={"git.commit": "0" * 7})


def test_nothing_is_written_where_nothing_was_recorded(tmp_path):
    empty = Workspace(root=tmp_path)

    assert run_lifecycle.close_dead_run(empty, "run-0", status="KILLED", reason="gone") == 0
    assert run_lifecycle.runs_without_process(empty) == []
    assert list(tmp_path.iterdir()) == []


def test_a_dead_run_is_closed_once_with_its_reason_and_leaves_others_alone(workspace, client):
    dead, alive = open_run(workspace, "run-dead"), open_run(workspace, "run-alive")

    closed = [
        run_lifecycle.close_dead_run(workspace, "run-dead", status="KILLED", reason=reason)
        for reason in ("lease expired", "again")
    ]

    assert closed == [1, 0]
    run = client.get_run(dead.mlflow_run_id)
    assert (run.info.status, run.data.tags["heterps.end_reason"]) == ("KILLED", "lease expired")
    assert client.get_run(alive.mlflow_run_id).info.status == "RUNNING"


def test_a_finished_run_is_never_called_dead(workspace, client):
    run = open_run(workspace, "run-good")
    run_lifecycle.close_run(workspace, run, status="FINISHED", reason="completed")

    assert run_lifecycle.close_dead_run(workspace, "run-good", status="KILLED", reason="late sweep") == 0
    assert client.get_run(run.mlflow_run_id).data.tags["heterps.end_reason"] == "completed"


def test_children_and_comparisons_of_a_dead_process_are_closed_with_it(workspace, client):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    training = open_run(workspace, "training-with-child")
    comparison = run_lifecycle.open_run(
        workspace,
        run_id="comparison-with-child",
        run_name="comparison-with-child",
        tags={},
        kind=Kind.COMPARISON,
    )
    for parent, run_id in ((training, "training-with-child"), (comparison, "comparison-with-child")):
        client.create_run(parent.experiment_id, tags={Tag.RUN_ID: run_id})
        client.set_tag(parent.mlflow_run_id, Tag.PROCESS, f"{ended.pid} 1.00")

    dead = run_lifecycle.runs_without_process(workspace)
    closed = [
        run_lifecycle.close_dead_run(workspace, run_id, status="KILLED", reason="gone") for run_id in dead
    ]

    assert dead == ["comparison-with-child", "training-with-child"]
    assert closed == [2, 2]
    assert run_lifecycle.runs_without_process(workspace) == []


def test_only_runs_whose_process_is_gone_count_as_without_process(workspace, client):
    open_run(workspace, "run-of-this-process")
    orphan = open_run(workspace, "run-of-a-dead-process")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    client.set_tag(orphan.mlflow_run_id, Tag.PROCESS, f"{ended.pid} 1.00")
    recycled = open_run(workspace, "run-of-a-recycled-pid")
    client.set_tag(recycled.mlflow_run_id, Tag.PROCESS, "1 1.00")
    foreign = open_run(workspace, "run-of-another-host")
    client.set_tag(foreign.mlflow_run_id, Tag.PROCESS, f"{ended.pid} 1.00")
    client.set_tag(foreign.mlflow_run_id, Tag.HOST, "elsewhere")

    assert run_lifecycle.runs_without_process(workspace) == ["run-of-a-dead-process", "run-of-a-recycled-pid"]
