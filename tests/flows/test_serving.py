"""The line as a user has it: `make serve` in one shell, literal commands in another, and a kill in mid-training.

One service for all tests here, as its start takes most of the time. Processes are found by the workspace
that stands in their environment, so that no other process of this machine is counted or touched.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from mlflow import MlflowClient

from flows.cli import main
from infra.workspace import HOME_VARIABLE
from tests.served_workspace import PROJECT, ServedWorkspace
from tests.waiting import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def clicks(clicks_of_runs):
    return clicks_of_runs


@pytest.fixture(scope="module")
def service(tmp_path_factory, workspace_of_runs) -> Iterator[ServedWorkspace]:
    served = ServedWorkspace(workspace_of_runs(tmp_path_factory.mktemp("served") / "home").root)
    try:
        served.wait_until_up()
        yield served
    finally:
        if served.process.poll() is None:
            served.stop()


def newest_run(workspace):
    return max(workspace.runs_directory.iterdir(), key=lambda path: path.stat().st_ctime)


def run_that_trains(service, before):
    """Return the one run that was not there before, once it has trained a step."""
    [progress] = wait_for(
        lambda: [
            path
            for path in service.workspace.runs_directory.glob("*/progress.json")
            if path.parent not in before
        ],
        what="the first training step",
    )
    return progress.parent.name


def test_the_literal_command_starts_a_run_that_completes(service, clicks):
    output = service.command(
        *("deployment", "run", "train-ctr", "--watch", "--watch-interval", "1"),
        *("--param", f"data={json.dumps(str(clicks))}", "--param", "batch_size=128"),
        *("--param", "scheduler=exact", "--param", "budget_evaluations=64", "--param", "baseline=false"),
    )

    assert "Completed" in output, output + service.serving_log()
    run = service.training_record(newest_run(service.workspace).name)
    assert run.info.status == "FINISHED"
    assert 0.5 < run.data.metrics["quality/auc"] < 1


@pytest.mark.weekly
def test_the_comparison_runs_by_its_bare_name(service):
    problem = PROJECT / "tests" / "golden" / "problems" / "five_layers_1.json"

    output = service.command(
        *("deployment", "run", "compare-schedulers", "--watch", "--watch-interval", "1"),
        *("--param", f"problem={json.dumps([str(problem)])}", "--param", 'methods=["exact", "cpu-only"]'),
        *("--param", "seeds=1"),
    )

    assert "Completed" in output, output + service.serving_log()
    client = MlflowClient(service.workspace.tracking_uri)
    experiment = client.get_experiment_by_name("compare-schedulers")
    runs = client.search_runs([experiment.experiment_id])
    assert {run.data.params.get("method") for run in runs} == {None, "exact", "cpu-only"}


def test_nightly_runs_stand_in_the_server(service):
    scheduled = [run for run in service.flow_runs("train-ctr") if run["state_type"] == "SCHEDULED"]

    assert scheduled
    assert {run["expected_start_time"][11:16] for run in scheduled} == {"04:30"}


def test_a_port_that_is_taken_is_named_with_its_owner_and_the_way_out(service, tmp_path):
    port = service.api_url.rpartition(":")[2].removesuffix("/api")
    other = {**service.shell, HOME_VARIABLE: str(tmp_path / "other"), "HETERPS_PREFECT_PORT": port}

    done = subprocess.run(
        [sys.executable, "-m", "flows.service.serve"],
        cwd=PROJECT,
        env=other,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert f"needs port {port} on 127.0.0.1, but it is taken by process" in done.stderr
    assert "HETERPS_PREFECT_PORT=<port>" in done.stderr


@pytest.mark.weekly
def test_the_sweep_ends_what_a_killed_flow_left_and_closes_its_record(service, clicks):
    flow = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "flows.train_ctr",
            "--data",
            str(clicks),
            "--epochs",
            "500",
            # As in the run before, for which the layers were measured.
            "--batch-size",
            "128",
            "--scheduler",
            "exact",
            # The searches that are only compared are not what is looked at here.
            "--budget-evaluations",
            "200",
        ],
        cwd=PROJECT,
        env=service.shell,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    before = set(service.workspace.runs_directory.iterdir())
    try:
        run_id = run_that_trains(service, before)
        # The watch of the lease sleeps in processes of six seconds.
        nodes = [node for node in service.nodes_of(run_id) if node.name() != "sleep"]
    finally:
        os.killpg(flow.pid, signal.SIGKILL)
        flow.communicate()
    assert nodes
    assert all(node.is_running() for node in nodes)
    assert service.training_record(run_id).info.status == "RUNNING"

    service.command("deployment", "run", "sweep-orphans", "--watch", "--watch-interval", "1")

    assert service.nodes_of(run_id) == []
    record = service.training_record(run_id)
    assert record.info.status == "KILLED"
    assert "owner process dead" in record.data.tags["heterps.end_reason"]


def prefect_servers(service):
    """Return the processes that are Prefect's server."""
    return [
        process
        for process in service.processes()
        if process.cmdline()[1:4] == ["-m", "flows.service.guarded_servers", "prefect"]
    ]


def test_a_service_that_dies_is_started_again(service):
    [server] = prefect_servers(service)
    server.kill()

    wait_for(
        lambda: "Prefect server is up again" in service.output.read_text(), timeout_s=400, what="the restart"
    )
    assert service.flow_runs("train-ctr")


def test_lines_of_the_project_are_in_the_log_of_the_flow(service):
    completed = next(run for run in service.flow_runs("train-ctr") if run["state_type"] == "COMPLETED")

    lines = service.ask("/logs/filter", {"logs": {"flow_run_id": {"any_": [completed["id"]]}}})

    assert "tasks.running.progress" in {line["name"] for line in lines}
    assert any("promised" in line["message"] for line in lines)


def test_the_status_shows_what_is_served(service, monkeypatch, capsys):
    document = json.loads(service.heterps("status", "--json"))

    assert [state.split()[0] for state in document["services"].values()] == ["up", "up", "up"]
    assert document["next_night"].endswith("04:30 UTC")
    assert document["machines"] == []
    assert document["caps"] == {"max_usd_per_hour": None, "max_usd_per_run": None, "max_usd_per_month": None}
    # The other commands in this process, which has their libraries.
    monkeypatch.setenv(HOME_VARIABLE, str(service.home))
    assert main(["runs", "--json"]) == 0
    finished = next(run for run in json.loads(capsys.readouterr().out) if run["status"] == "FINISHED")
    assert main(["explain", finished["run_id"]]) == 0
    assert "Why this plan" in capsys.readouterr().out


def test_a_value_outside_the_form_is_refused_by_the_server(service):
    with pytest.raises(AssertionError, match="epochs"):
        service.command("deployment", "run", "train-ctr", "--param", "epochs=0")


@pytest.mark.weekly
def test_the_sweep_ends_what_a_run_of_a_deleted_deployment_left(service, clicks):
    service.command(
        *(
            "deployment",
            "run",
            "train-ctr",
            "--param",
            f"data={json.dumps(str(clicks))}",
            "--param",
            "epochs=500",
        ),
        *("--param", "batch_size=128", "--param", "scheduler=exact", "--param", "budget_evaluations=64"),
    )
    before = set(service.workspace.runs_directory.iterdir())
    run_id = run_that_trains(service, before)
    assert service.nodes_of(run_id)

    service.command("--no-prompt", "deployment", "delete", "train-ctr/train-ctr")
    [flow] = [each for each in service.processes() if each.cmdline()[1:3] == ["-m", "prefect.engine"]]
    flow.kill()
    wait_for(
        lambda: (
            "its deployment was deleted in Prefect, so sweep-orphans ends its machines"
            in service.serving_log()
        ),
        what="the line about the deleted deployment",
    )
    service.command("deployment", "run", "sweep-orphans", "--watch", "--watch-interval", "1")

    assert service.nodes_of(run_id) == []
    assert service.training_record(run_id).info.status in ("KILLED", "FAILED")
    assert "Traceback" not in service.serving_log()


@pytest.mark.weekly
def test_what_a_killed_supervisor_leaves_is_ended_by_the_next_one(service):
    service.process.kill()
    service.process.wait(10)
    service.restart()

    service.wait_until_up()

    assert (
        "ended the services that an earlier process, which was killed, had left" in service.output.read_text()
    )
    assert len(prefect_servers(service)) == 1


def test_stopping_leaves_no_process(service):
    service.process.send_signal(signal.SIGINT)

    assert service.process.wait(200) == 0
    assert service.processes() == []
    assert not service.workspace.services_path.exists()
