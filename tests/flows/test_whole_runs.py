"""Whole runs of `train-ctr`, each in a process of its own: in a notebook, asked for twice, stopped, resumed."""

import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
from mlflow import MlflowClient
from prefect.settings import PREFECT_API_URL

from heterps_core.data.synthetic.click_stream import write_click_days
from heterps_core.training.checkpoint import complete_checkpoints
from heterps_core.training.step_metrics import read_progress
from heterps_core.training.storage.run_directory import RunDirectory
from infra.workspace import HOME_VARIABLE, Workspace
from tasks.records.past_runs import finished_run, past_trainings
from tasks.sources import ClickSource
from tests.paths import PROJECT
from tests.waiting import wait_for

pytestmark = pytest.mark.weekly

LIMIT_S = 180.0
SETTINGS = [
    *("--model", "ctrdnn"),
    *("--epochs", "1000", "--batch-size", "128", "--scheduler", "reinforce", "--budget-evaluations", "256"),
    *("--provider", "local", "--device-types", "cpu-c7i", "gpu-t4"),
    *("--planned-samples", "1e9"),  # whose plan has two stages
]
DAY = "2026-11-01"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, prefect_server):
    """All runs share it, so that layers are measured once."""
    return Workspace(root=tmp_path_factory.mktemp("whole") / "home").create()


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    """A day to train on, and the one that it is judged on."""
    folder = tmp_path_factory.mktemp("clicks")
    write_click_days(folder, first_day=date.fromisoformat(DAY), num_days=2, rows_per_day=2_000, seed=0)
    return str(folder)


def start(workspace, *arguments):
    """Start a run as a person does."""
    return subprocess.Popen(
        [sys.executable, "-m", "flows.train_ctr", *arguments, *SETTINGS],
        cwd=PROJECT,
        env=environment(workspace),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def environment(workspace):
    return {
        **os.environ,
        HOME_VARIABLE: str(workspace.root),
        "PREFECT_API_URL": PREFECT_API_URL.value(),
    }


def ended(process):
    """Return exit status, what a run said, and the last line that it said of an error."""
    with process:
        said, errors = process.communicate(timeout=LIMIT_S)
    return process.returncode, said, (errors.strip().splitlines() or [""])[-1]


def stop(workspace, run_id):
    """Let a run write a checkpoint and end, as an operator does."""
    subprocess.run(
        [Path(sys.executable).with_name("heterps"), "stop", run_id],
        env={**os.environ, HOME_VARIABLE: str(workspace.root)},
        check=True,
    )


def record_of(workspace, run_id):
    """Return MLflow's record of a run."""
    [found] = [past for past in past_trainings(workspace, most=5) if past.run_id == run_id]
    return found


def is_done(workspace, clicks):
    """Tell whether the day counts as trained."""
    return finished_run(workspace, day=DAY, data=ClickSource(data=clicks).name, model="ctrdnn") is not None


def test_a_notebook_whose_event_loop_runs_gets_the_run_back(workspace, clicks):
    program = (
        "import asyncio, heterps\n"
        "async def cell(): return heterps.train(plan_only=True, provider='local', scheduler='exact', "
        f"data={clicks!r})\n"
        "print(asyncio.run(cell()))"
    )
    said = subprocess.run(
        [sys.executable, "-c", program],
        cwd=PROJECT,
        env=environment(workspace),
        capture_output=True,
        text=True,
        check=True,
    )

    [run] = past_trainings(workspace, most=1)
    assert f"run         {run.run_id}\nmodel       cross-deep\nplan        {run.plan}" in said.stdout
    assert "launched    nothing" in said.stdout
    assert "Traceback" not in said.stderr


def test_a_run_that_is_asked_for_twice_and_then_stopped_is_not_judged_and_goes_on_when_asked(
    workspace, clicks
):
    earlier = set(workspace.runs_directory.iterdir())
    run = start(workspace, "--data", clicks)
    try:

        def step():
            assert run.poll() is None, f"it has ended with status {run.returncode}"
            new = set(workspace.runs_directory.iterdir()) - earlier
            progress = read_progress(RunDirectory(str(*new))) if new else None
            return progress.step if progress else None

        wait_for(step, timeout_s=LIMIT_S, what="the first training step")
        [folder] = set(workspace.runs_directory.iterdir()) - earlier

        # Asked for a second time while it lives, such as by a double click: refused, and the first trains on.
        status, _, line = ended(start(workspace, "--resume-run-id", folder.name))
        assert status == 5
        assert re.search(rf"run {folder.name} has \d machines", line)
        assert line.endswith(f"heterps stop {folder.name}")
        step_then = step()
        wait_for(lambda: step() > step_then, timeout_s=LIMIT_S, what="a step after the refusal")
        assert record_of(workspace, folder.name).status == "RUNNING"

        stop(workspace, folder.name)
        status, _, line = ended(run)
    finally:
        with run:
            run.kill()
    assert status == 6
    assert line.endswith(f"set resume_run_id={folder.name} to go on from there")
    stopped = record_of(workspace, folder.name)
    assert stopped.status == "KILLED"
    assert stopped.tags["heterps.end_reason"] == f"stopped: {line.removeprefix('stopped: ')}"
    assert stopped.metrics["night/usd"] > 0
    client = MlflowClient(workspace.tracking_uri)
    assert not client.search_registered_models()
    assert not is_done(workspace, clicks)
    [*_, newest] = complete_checkpoints(RunDirectory(str(folder)))
    assert f"wrote a checkpoint at step {int(newest):,}" in line

    run = start(workspace, "--resume-run-id", folder.name)
    try:
        wait_for(lambda: step() > int(newest), timeout_s=LIMIT_S, what="a step after the checkpoint")
        stop(workspace, folder.name)
        status, said, _ = ended(run)
    finally:
        with run:
            run.kill()
    assert status == 6
    assert f"from the checkpoint of step {int(newest):,}" in said
