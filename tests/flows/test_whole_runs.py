"""Whole runs of `train-ctr`, each in a process of its own: planned only, asked for twice, stopped, resumed."""

import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
from mlflow import MlflowClient
from prefect.settings import PREFECT_API_URL

from heterps_core.data.click_days import write_click_days
from heterps_core.data.synthetic import write_click_stream
from heterps_core.training.run_directory import RunDirectory
from heterps_core.training.step_metrics import read_progress
from infra.ledger import Ledger
from infra.workspace import HOME_VARIABLE, Workspace
from tasks.data import source_name
from tasks.past_runs import past_trainings
from tasks.runs import finished_run
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).parents[2]
LIMIT_S = 180.0
SETTINGS = [
    *("--epochs", "60", "--batch-size", "128", "--scheduler", "exact", "--budget-evaluations", "64"),
    *("--device-types", "cpu-c7i", "gpu-t4"),
]
DAY = date(2026, 11, 1)


@pytest.fixture
def workspace(tmp_path):
    return Workspace(root=tmp_path / "home").create()


def start(workspace, *arguments):
    """Start a run as a person does."""
    return subprocess.Popen(
        [sys.executable, "-m", "flows.train_ctr", *arguments],
        cwd=PROJECT,
        env={
            **os.environ,
            HOME_VARIABLE: str(workspace.root),
            "PREFECT_API_URL": PREFECT_API_URL.value(),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    """Return exit status, what a run said, and the last line that it said of an error."""
    with process:
        said, errors = process.communicate(timeout=LIMIT_S)
    return process.returncode, said, (errors.strip().splitlines() or [""])[-1]


def test_a_run_that_plans_only_says_what_would_be_bought_and_trains_nothing(
    tmp_path, workspace, prefect_server
):
    write_click_days(tmp_path / "clicks", first_day=DAY, num_days=2, rows_per_day=2_000, seed=0)
    data = str(tmp_path / "clicks")

    status, said, _ = ended(start(workspace, "--data", data, "--plan-only", *SETTINGS))

    assert status == 0
    assert re.search(r"would cost [0-9.]+ USD/hour", said)
    assert "optimal: no plan for this problem is cheaper" in said
    [planned] = past_trainings(workspace, most=5)
    assert (planned.status, planned.tags["heterps.end_reason"]) == ("FINISHED", "plan only")
    assert not workspace.ledger_path.exists() or not Ledger(workspace.ledger_path).entries()
    # Its day is still to be trained.
    source = source_name(data, None)
    assert finished_run(workspace, day=str(DAY), data=source, model="ctrdnn") is None


def test_a_run_that_is_stopped_is_not_judged_and_goes_on_when_asked(tmp_path, workspace, prefect_server):
    clicks = write_click_stream(tmp_path / "clicks.tsv", num_rows=4_000, seed=0).path
    run = start(workspace, "--data", str(clicks), *SETTINGS)
    try:

        def step():
            assert run.poll() is None, f"it has ended with status {run.returncode}"
            folders = list(workspace.runs_directory.glob("*"))
            progress = read_progress(RunDirectory(str(*folders))) if folders else None
            return progress.step if progress else None

        wait_for(step, timeout_s=LIMIT_S, what="the first training step")
        [folder] = workspace.runs_directory.glob("*")

        # Asked for a second time while it lives, such as by a double click: refused, and the first trains on.
        status, _, line = ended(start(workspace, "--resume-run-id", folder.name, *SETTINGS))
        assert status == 5
        assert re.search(rf"run {folder.name} has \d machines", line)
        assert line.endswith(f"heterps stop {folder.name}")
        step_then = step()
        wait_for(lambda: step() > step_then, timeout_s=LIMIT_S, what="a step after the refusal")
        assert [past.status for past in past_trainings(workspace, most=5)] == ["RUNNING"]

        subprocess.run(
            [Path(sys.executable).with_name("heterps"), "stop", folder.name],
            env={**os.environ, HOME_VARIABLE: str(workspace.root)},
            check=True,
        )
        status, _, line = ended(run)
    finally:
        with run:
            run.kill()
    assert status == 6
    assert line.endswith(f"set resume_run_id={folder.name} to go on from there")
    [stopped] = past_trainings(workspace, most=5)
    assert stopped.status == "FAILED"
    assert stopped.metrics["night/usd"] > 0
    client = MlflowClient(workspace.tracking_uri)
    assert not client.search_registered_models()

    status, _, _ = ended(start(workspace, "--resume-run-id", folder.name, *SETTINGS))

    assert status == 0
    [finished] = past_trainings(workspace, most=5)
    assert (finished.run_id, finished.status) == (folder.name, "FINISHED")
    [version] = client.search_model_versions("name = 'ctr'")
    assert version.tags["heterps.run_id"] == folder.name
