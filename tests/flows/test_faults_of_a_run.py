"""Whole runs of `train-ctr`, each in its own process, while MLflow is killed or databases are locked.

What a run should have recorded is read from the notes of its record and from the steps that its workers wrote. All
runs share a workspace, so that layers are measured once.
"""

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from mlflow import MlflowClient
from prefect.settings import PREFECT_API_URL

from heterps_core.training.step_metrics import read_progress, read_steps
from heterps_core.training.storage.run_directory import RunDirectory
from infra.ledger.ledger import Ledger
from infra.workspace import HOME_VARIABLE, TRACKING_VARIABLE, Workspace
from tasks.records.run_record import refused_records, waiting_records
from tests.paths import PROJECT
from tests.tracking_server import TrackingServer
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

LIMIT_S = 180.0
SETTINGS = [
    *("--model", "ctrdnn"),
    *("--epochs", "30", "--batch-size", "128", "--scheduler", "exact", "--budget-evaluations", "64"),
    *("--provider", "local", "--device-types", "cpu-c7i", "gpu-t4"),
    *("--planned-samples", "1e9"),  # whose plan has two stages
]


class Run:
    """`train-ctr` as a person starts it."""

    def __init__(self, workspace, clicks, **environment):
        self.workspace = workspace
        self.earlier = set(workspace.runs_directory.glob("*"))
        self.said = workspace.root / "run.out"
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.train_ctr", "--data", str(clicks), *SETTINGS],
                cwd=PROJECT,
                env={
                    **os.environ,
                    **environment,
                    HOME_VARIABLE: str(workspace.root),
                    "PREFECT_API_URL": PREFECT_API_URL.value(),
                    "PYTHONUNBUFFERED": "1",
                },
                stdout=said,
                stderr=subprocess.PIPE,
                text=True,
            )

    @property
    def directory(self):
        """Where its workers write; None before it has begun."""
        new = set(self.workspace.runs_directory.glob("*")) - self.earlier
        return RunDirectory(str(new.pop())) if new else None

    @property
    def run_id(self):
        return Path(self.directory.location).name

    def step(self):
        """The newest step that it has reported; None before the first."""
        assert self.process.poll() is None, self.process.stderr.read()
        progress = read_progress(self.directory) if self.directory else None
        return progress.step if progress else None

    def wait_for_training(self):
        return wait_for(self.step, timeout_s=LIMIT_S, what="the first training step")

    def wait_for_word(self, word):
        def is_said():
            assert self.process.poll() is None, self.process.stderr.read()
            return word in self.said.read_text()

        wait_for(is_said, timeout_s=LIMIT_S, what=f"{word!r} in what the run says")

    def end(self):
        """Wait for its end; return its status and what it said of errors."""
        _, errors = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, errors

    def kill(self):
        """End it at once; nothing happens where it has ended."""
        with self.process:
            self.process.kill()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, workspace_of_runs):
    return workspace_of_runs(tmp_path_factory.mktemp("faults") / "home")


@pytest.fixture
def clicks(clicks_of_runs):
    return clicks_of_runs


@pytest.fixture
def refused(tmp_path_factory, clicks, prefect_server):
    """A run whose database is locked from its start on; it waits for 20 s."""
    workspace = Workspace(root=tmp_path_factory.mktemp("refused") / "home").create()
    with locked(workspace.tracking_path):
        run = Run(workspace, clicks)
        yield run
        run.kill()


@contextmanager
def locked(*databases):
    """Hold databases as another program would: nobody writes to them, nor reads what keeps no log of writes."""
    holders = [sqlite3.connect(path, isolation_level=None) for path in databases]
    try:
        for holder in holders:
            holder.execute("BEGIN EXCLUSIVE")
        yield
    finally:
        for holder in holders:
            holder.close()


def points(client, mlflow_run_id):
    """Return how often each (key, value, timestamp, step) stands in the record of a run."""
    keys = client.get_run(mlflow_run_id).data.metrics
    return Counter(
        (point.key, point.value, point.timestamp, point.step)
        for key in keys
        for point in client.get_metric_history(mlflow_run_id, key)
    )


def noted_points(run):
    """Return the figures that stand in the run's own record."""
    lines = (run.workspace.records_directory / run.run_id / "notes.jsonl").read_text().splitlines()
    return Counter(tuple(metric) for line in lines if line for metric in json.loads(line).get("metrics", ()))


def losses(recorded):
    return sorted((step, value) for key, value, _, step in recorded.elements() if key == "train/log_loss")


def losses_of_workers(run):
    [attempt] = read_steps(run.directory)
    return [(step.step, step.loss) for step in attempt]


def training_record(client, run):
    experiment = client.get_experiment_by_name("train-ctr")
    runs = client.search_runs([experiment.experiment_id], f"tags.`heterps.run_id` = '{run.run_id}'")
    [training] = [each for each in runs if each.data.tags["heterps.kind"] == "training"]
    return training, [each for each in runs if each is not training]


@pytest.mark.weekly
def test_a_tracking_server_that_is_killed_in_mid_training_gets_every_figure_once(
    tmp_path, workspace, clicks, prefect_server
):
    server = TrackingServer(tmp_path)
    run = Run(workspace, clicks, **{TRACKING_VARIABLE: server.url, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"})
    try:
        step_at_kill = run.wait_for_training()
        server.stop()
        run.wait_for_word("register   waits for MLflow's store")
        noted = noted_points(run)
        server.start()
        status, errors = run.end()

        assert (status, errors) == (0, "")
        assert (waiting_records(workspace), refused_records(workspace)) == ([], [])
        client = MlflowClient(server.url)
        training, children = training_record(client, run)
        recorded = points(client, training.info.run_id)
        # The figures that were noted before and while the server was away are there, each once.
        assert "predicted/step_seconds" in {name for name, *_ in noted}
        assert {point: recorded[point] for point in noted} == dict.fromkeys(noted, 1)
        assert max(recorded.values()) == 1
        # What the workers wrote of their steps is there too, and goes beyond what was trained when it was killed.
        assert losses(recorded) == losses_of_workers(run)
        assert losses(recorded)[-1][0] > step_at_kill
        assert {
            "cost/billed_usd",
            "quality/auc",
            "overhead/start_to_first_step_s",
        } <= training.data.metrics.keys()
        assert len({child.info.run_name for child in children}) == len(children) > 0
        assert training.info.status == "FINISHED"
        assert {each.info.status for each in children} == {"FINISHED"}
        [version] = client.search_model_versions("name = 'ctr'")
        assert version.run_id == training.info.run_id
    finally:
        run.kill()
        server.stop()


@pytest.mark.weekly
def test_databases_that_are_locked_in_mid_training_cost_no_figure(workspace, clicks, prefect_server):
    run = Run(workspace, clicks)
    try:
        run.wait_for_training()
        with locked(workspace.tracking_path, prefect_server):
            run.wait_for_word("trained")
            # The first writes after the training meet the lock.
            time.sleep(2)
            assert run.process.poll() is None
        status, errors = run.end()

        assert (status, errors) == (0, "")
        assert waiting_records(workspace) == []
        training, _ = training_record(MlflowClient(workspace.tracking_uri), run)
        recorded = points(MlflowClient(workspace.tracking_uri), training.info.run_id)
        assert losses(recorded) == losses_of_workers(run)
        assert max(recorded.values()) == 1
        assert training.info.status == "FINISHED"
    finally:
        run.kill()


@pytest.mark.weekly
def test_a_run_whose_database_is_locked_at_its_start_is_refused_in_one_line(refused):
    status, errors = refused.end()

    uri = refused.workspace.tracking_uri
    assert status == 2
    assert errors.startswith(f"error: runs are recorded in {uri}, which must answer, but does not")
    assert "database is locked" in errors
    assert len(errors.splitlines()) == 1
    assert not Ledger(refused.workspace.ledger_path).entries()
    assert refused.directory is None
