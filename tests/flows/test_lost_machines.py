"""Whole runs of `train-ctr` that lose machines without notice: they go on by themselves, and not for ever."""

import os
import re
import subprocess
import sys
from collections import Counter
from functools import cached_property
from pathlib import Path

import pytest
from mlflow import MlflowClient
from prefect.settings import PREFECT_API_URL

from heterps_core.training.checkpoint import complete_checkpoints
from heterps_core.training.step_metrics import read_progress
from heterps_core.training.storage.run_directory import RunDirectory
from infra.ledger.ledger import EntryState, Ledger
from infra.workspace import HOME_VARIABLE
from tasks.records.mlflow_names import Kind
from tasks.records.mlflow_store import runs_of
from tests.heterps_core.training.node_processes import kill_machine, nodes_of
from tests.paths import PROJECT
from tests.waiting import wait_for

# Two or three whole runs each, of a minute or more beside another test process.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 240.0
NUM_STEPS = 70 * 12
SETTINGS = [
    *("--model", "ctrdnn"),
    *("--epochs", "70", "--batch-size", "128", "--scheduler", "exact", "--budget-evaluations", "64"),
    *("--provider", "local", "--device-types", "cpu-c7i", "gpu-t4"),
    *("--planned-samples", "1e9"),  # whose plan has two stages
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, workspace_of_runs, prefect_server):
    return workspace_of_runs(tmp_path_factory.mktemp("lost") / "home")


@pytest.fixture
def clicks(clicks_of_runs):
    return clicks_of_runs


class Run:
    """`train-ctr` as a person starts it, and the loss of its machines."""

    def __init__(self, workspace, clicks):
        self.workspace = workspace
        self.earlier = set(workspace.runs_directory.iterdir())
        self.said = workspace.root / "run.out"
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.train_ctr", "--data", clicks, *SETTINGS],
                cwd=PROJECT,
                env={
                    **os.environ,
                    HOME_VARIABLE: str(workspace.root),
                    "PREFECT_API_URL": PREFECT_API_URL.value(),
                    "PYTHONUNBUFFERED": "1",
                },
                stdout=said,
                stderr=subprocess.PIPE,
                text=True,
            )

    @cached_property
    def directory(self):
        """Where its workers write; waits until it has begun."""

        def begun():
            assert self.process.poll() is None, self.process.stderr.read()
            return set(self.workspace.runs_directory.iterdir()) - self.earlier

        [folder] = wait_for(begun, timeout_s=LIMIT_S, what="the folder of the run")
        return RunDirectory(str(folder))

    def lose_a_machine(self):
        """End a node, with all that runs on it, at once, some steps after a checkpoint of its own launch."""
        seen = set()

        def is_after_a_checkpoint():
            assert self.process.poll() is None, self.process.stderr.read()
            progress = read_progress(self.directory)
            seen.add((progress.attempt, progress.step) if progress else None)
            has_moved = len(seen - {None}) > 1
            complete = complete_checkpoints(self.directory) if has_moved else []
            return complete and progress.step > int(complete[-1]) and self.nodes()

        *_, last = wait_for(is_after_a_checkpoint, timeout_s=LIMIT_S, what="steps after a checkpoint")
        kill_machine(last)

    def nodes(self):
        """Return the first process of each of its nodes."""
        return nodes_of(self.process.pid) if self.process.poll() is None else []

    def end(self):
        """Wait for its end; return its status and what it said of errors."""
        _, errors = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, errors

    def kill(self):
        with self.process:
            self.process.kill()


def record_of(workspace, run):
    """Return the figures of a run, and how often each loss stands in its record, by (step, loss)."""
    client = MlflowClient(workspace.tracking_uri)
    [record] = runs_of(client, Path(run.directory.location).name, Kind.TRAINING)
    history = client.get_metric_history(record.info.run_id, "train/log_loss")
    return record, Counter((point.step, point.value) for point in history)


def trained(workspace, clicks, *, num_losses):
    run = Run(workspace, clicks)
    try:
        assert run.directory.is_local
        for _ in range(num_losses):
            run.lose_a_machine()
        status, errors = run.end()
    finally:
        run.kill()
    return run, status, errors


@pytest.mark.weekly
def test_a_run_that_loses_a_machine_goes_on_by_itself_and_ends_as_one_that_was_not_disturbed(
    workspace, clicks
):
    undisturbed, *_ = trained(workspace, clicks, num_losses=0)

    run, status, errors = trained(workspace, clicks, num_losses=1)

    assert (status, errors) == (0, "")
    said = run.said.read_text()
    assert re.search(r"lost .* steps are lost, and the run goes on from step [0-9,]+", said)
    record, losses = record_of(workspace, run)
    record_of_other, losses_of_other = record_of(workspace, undisturbed)
    # Each step stands in the record once, with the loss that it has where nothing happens.
    assert set(losses.values()) == {1}
    assert sorted(step for step, _ in losses) == list(range(1, NUM_STEPS + 1))
    assert sorted(losses)[-1] == pytest.approx(sorted(losses_of_other)[-1], abs=1e-5)
    figures, figures_of_other = record.data.metrics, record_of_other.data.metrics
    assert record.info.status == "FINISHED"
    assert figures["quality/auc"] == pytest.approx(figures_of_other["quality/auc"], abs=1e-5)
    # What was trained twice is known, and stands in what the run paid for nothing.
    assert figures["measured/repeated_steps"] > 0
    assert figures_of_other["measured/repeated_steps"] == 0
    assert "steps done again" in said
    # Two launches of one run, both ended.
    run_id = Path(run.directory.location).name
    entries = [entry for entry in Ledger(workspace.ledger_path).entries() if entry.run_id.startswith(run_id)]
    assert {entry.run_id for entry in entries} == {run_id, f"{run_id}.2"}
    assert {entry.state for entry in entries} == {EntryState.ENDED}


@pytest.mark.weekly
def test_a_run_that_loses_machines_three_times_in_an_hour_ends_with_a_reason(workspace, clicks):
    run, status, errors = trained(workspace, clicks, num_losses=3)

    run_id = Path(run.directory.location).name
    assert status == 6
    assert f"may restart 2 times in an hour, but {run_id} has lost machines or workers 3 times" in errors
    assert f"set resume_run_id={run_id} to go on from step" in errors
    record, _ = record_of(workspace, run)
    assert record.info.status == "FAILED"
    assert not run.nodes()
