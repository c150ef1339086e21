"""Whole runs of `train-ctr` on the machines of a cluster: one that ends, and one whose flow is killed."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import psutil
import pytest

from heterps_core.training.node import NODE_ID_VARIABLE
from heterps_core.training.step_metrics import read_progress
from heterps_core.training.storage.run_directory import RunDirectory
from infra.inventory import MachineKind, inventory_path, inventory_text
from infra.ledger.ledger import EndReason, EntryState, Ledger
from infra.machines.sweeper import sweep_workspace
from infra.workspace import HOME_VARIABLE
from tests.paths import PROJECT
from tests.ray_cluster import ray_cluster
from tests.slurm_cluster import slurm_cluster
from tests.started_runs import started_runs
from tests.waiting import wait_for

pytestmark = [pytest.mark.weekly, pytest.mark.root, pytest.mark.timeout(600)]

LIMIT_S = 300.0
USD_PER_HOUR = 0.7
SETTINGS = [
    *("--batch-size", "128", "--scheduler", "exact", "--budget-evaluations", "64"),
    *("--device-types", "cpu-epyc-1", "cpu-xeon-1"),
]
SELECTORS = {"ray": "resource", "slurm": "features"}


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster() as started:
        yield started


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, workspace_of_runs, prefect_server):
    made = workspace_of_runs(tmp_path_factory.mktemp("slurm") / "home")
    write_inventory(made, "slurm")
    return made


def write_inventory(workspace, home):
    kinds = [
        MachineKind(
            kind=f"{name}-1",
            home=home,
            count=2,
            cores=1,
            memory_gb=4.0,
            price_usd_per_hour=USD_PER_HOUR,
            selector={SELECTORS[home]: name},
        )
        for name in ("epyc", "xeon")
    ]
    inventory_path(workspace).write_text(inventory_text(kinds))


def train_on(home, clicks):
    return ["-m", "flows.train_ctr", "--provider", home, "--data", clicks, *SETTINGS]


@pytest.fixture
def start(cluster, workspace, clicks_of_runs, monkeypatch):
    """Starts a run as a person does, and ends it whatever becomes of the test."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    with started_runs(workspace, *train_on("slurm", clicks_of_runs)) as started:
        yield started


def newest_entries(workspace):
    entries = Ledger(workspace.ledger_path).entries()
    return [entry for entry in entries if entry.run_id == entries[-1].run_id]


def test_a_night_is_planned_trained_and_billed(start, cluster, workspace):
    run = start()
    said, errors = run.communicate(timeout=LIMIT_S)

    assert (run.returncode, errors) == (0, "")
    assert "dry run" not in said
    assert cluster.queue() == []
    entries = newest_entries(workspace)
    assert {(e.provider, e.state, e.reason) for e in entries} == {
        ("slurm", EntryState.ENDED, EndReason.RUN_ENDED)
    }
    assert {entry.price_usd_per_hour for entry in entries} == {USD_PER_HOUR}


def test_a_killed_flow_leaves_no_job_after_its_lease(start, cluster, workspace):
    earlier = set(workspace.runs_directory.iterdir())
    run = start("--epochs", "1000")

    def step():
        assert run.poll() is None, run.stderr.read()
        new = set(workspace.runs_directory.iterdir()) - earlier
        return any(read_progress(RunDirectory(str(folder))) for folder in new)

    wait_for(step, timeout_s=LIMIT_S, what="the first training step", poll_s=0.5)
    run.kill()
    run.wait()
    assert cluster.queue()

    wait_for(lambda: not cluster.queue(), timeout_s=LIMIT_S, what="the end of its job", poll_s=1.0)
    swept = sweep_workspace(workspace)
    assert swept.problems == ()
    assert {entry.state for entry in newest_entries(workspace)} == {EntryState.ENDED}


@pytest.fixture
def ray_machines():
    with ray_cluster() as machines:
        yield machines


@contextmanager
def running_on_ray(machines, workspace, clicks, *arguments):
    """A run as a person starts it on a machine of the cluster."""
    write_inventory(workspace, "ray")
    environment = {**os.environ, **machines.environment, HOME_VARIABLE: str(workspace.root)}
    # Prefect's server listens outside of the machines' network: the run has one of its own.
    environment.pop("PREFECT_API_URL", None)
    with subprocess.Popen(
        ["nsenter", f"--net={machines.namespace}", sys.executable, *train_on("ray", clicks), *arguments],
        cwd=PROJECT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        try:
            yield run
        finally:
            run.kill()


def test_a_night_is_planned_trained_and_billed_on_ray(
    ray_machines, tmp_path, workspace_of_runs, clicks_of_runs
):
    workspace = workspace_of_runs(tmp_path / "home")

    with running_on_ray(ray_machines, workspace, clicks_of_runs) as run:
        said, _ = run.communicate(timeout=LIMIT_S)

    assert run.returncode == 0, said
    assert "dry run" not in said
    entries = newest_entries(workspace)
    assert {(e.provider, e.state, e.reason) for e in entries} == {
        ("ray", EntryState.ENDED, EndReason.RUN_ENDED)
    }
    assert {entry.price_usd_per_hour for entry in entries} == {USD_PER_HOUR}


def machine_of_a_node(machines):
    """Return all processes of a machine that runs a node: its raylet, the worker of the actor and the node."""
    for process in machines.inside():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            worker = process.parent()
            if (
                NODE_ID_VARIABLE in process.environ()
                and worker
                and worker.cmdline()[0].startswith("ray::Node")
            ):
                return [worker.parent(), *worker.parent().children(recursive=True)]
    return []


def test_a_night_goes_on_where_a_machine_of_ray_is_lost(
    ray_machines, tmp_path, workspace_of_runs, clicks_of_runs
):
    workspace = workspace_of_runs(tmp_path / "home")
    for spare in ("epyc", "xeon"):
        ray_machines.add_node(spare)

    with running_on_ray(ray_machines, workspace, clicks_of_runs, "--epochs", "4000") as run:

        def progress():
            assert run.poll() is None, run.stdout.read()
            folders = workspace.runs_directory.glob("*")
            return next(filter(None, (read_progress(RunDirectory(str(each))) for each in folders)), None)

        step = wait_for(progress, timeout_s=LIMIT_S, what="the first step", poll_s=0.2)
        for process in machine_of_a_node(ray_machines):
            process.kill()
        killed_s = time.monotonic()
        wait_for(
            lambda: progress().attempt > step.attempt, timeout_s=LIMIT_S, what="a step after", poll_s=0.2
        )
        print(f"the next step came {time.monotonic() - killed_s:.1f} s after the loss")

    wait_for(lambda: not machine_of_a_node(ray_machines), what="the end of the nodes")
