"""The way without `make serve`: prefect.yaml deployed to a server, and a process worker that runs a deployment."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

from flows.service.deployments import deployments
from flows.service.prefect_connection import project_environment
from infra.workspace import Workspace, answers, free_loopback_port
from tests.paths import PROJECT
from tests.waiting import wait_for

PREFECT = Path(sys.executable).with_name("prefect")
DOCUMENT = yaml.safe_load((PROJECT / "prefect.yaml").read_text())

OF_THE_WORKER = {"HETERPS_HOME", "PREFECT_HOME"}
"""Paths that a worker has from its own shell."""


def test_the_file_has_every_deployment_that_is_served_with_its_schedule():
    served = {one.name: one for one in deployments()}
    written = {one["name"]: one for one in DOCUMENT["deployments"]}

    assert written.keys() == served.keys()
    for name, one in written.items():
        schedules = [
            {
                key: value
                for key, value in (
                    ("cron", getattr(s.schedule, "cron", None)),
                    ("timezone", s.schedule.timezone if hasattr(s.schedule, "cron") else None),
                    (
                        "interval",
                        getattr(s.schedule, "interval", None) and s.schedule.interval.total_seconds(),
                    ),
                )
                if value
            }
            for s in served[name].schedules
        ]
        assert one.get("schedules", []) == schedules, name
        limit = served[name].concurrency_limit
        wanted = None if limit is None else {"limit": limit, "collision_strategy": "CANCEL_NEW"}
        assert one.get("concurrency_limit") == wanted, name


def test_a_workers_runs_have_the_environment_of_served_ones(tmp_path):
    wanted = project_environment(Workspace(root=tmp_path))

    for one in DOCUMENT["deployments"]:
        given = one["work_pool"]["job_variables"]["env"]
        assert given == {name: value for name, value in wanted.items() if name not in OF_THE_WORKER}


class TeamServer:
    """A Prefect server of its own with the deployments of prefect.yaml, and the shell of a worker."""

    def __init__(self, home):
        self.home, self.log = home, (home / "server.log").open("w")
        port = free_loopback_port()
        self.api_url = f"http://127.0.0.1:{port}/api"
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))
        }
        self.environment = {
            **clean,
            **project_environment(Workspace(root=home / "home").create()),
            "PREFECT_API_URL": self.api_url,
            "PREFECT_CLI_PROMPT": "false",
        }
        self.process = self.start("server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui")

    def start(self, *arguments):
        return subprocess.Popen(
            [str(PREFECT), *arguments], cwd=PROJECT, env=self.environment, stdout=self.log, stderr=self.log
        )

    def prefect(self, *arguments):
        done = subprocess.run(
            [str(PREFECT), *arguments],
            cwd=PROJECT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def deploy(self):
        self.prefect("--no-prompt", "deploy", "--all")

    def states(self):
        """Return the states of the runs of sweep-orphans that have begun."""
        body = json.dumps({"flows": {"name": {"any_": ["sweep-orphans"]}}, "sort": "END_TIME_DESC"}).encode()
        request = urllib.request.Request(
            f"{self.api_url}/flow_runs/filter", data=body, headers={"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            states = [run["state_type"] for run in json.load(response)]
        return [state for state in states if state != "SCHEDULED"]


@pytest.fixture
def team_server(tmp_path):
    server = TeamServer(tmp_path)
    try:
        wait_for(
            lambda: server.process.poll() is not None or answers(f"{server.api_url}/health", timeout_s=1.0),
            what="the server",
            poll_s=0.2,
        )
        assert server.process.poll() is None
        server.prefect("work-pool", "create", "heterps", "--type", "process")
        server.deploy()
        yield server
    finally:
        server.process.terminate()
        server.process.wait(30)
        server.log.close()


@pytest.mark.weekly
def test_a_process_worker_runs_a_deployment_to_its_end(team_server):
    team_server.prefect("deployment", "run", "sweep-orphans")
    team_server.prefect("worker", "start", "--pool", "heterps", "--run-once")

    assert "COMPLETED" in team_server.states()
    assert (team_server.home / "home" / "ledger.sqlite").exists()


@pytest.mark.weekly
@pytest.mark.timeout(600)
def test_a_run_ends_whose_work_pool_is_deleted_and_the_next_one_begins_once_all_is_deployed_again(
    team_server,
):
    team_server.prefect("deployment", "run", "sweep-orphans")
    worker = team_server.start("worker", "start", "--pool", "heterps", "--run-once")
    wait_for(lambda: "RUNNING" in team_server.states(), what="the run")
    team_server.prefect("--no-prompt", "work-pool", "delete", "heterps")
    worker.wait(120)
    assert "COMPLETED" in team_server.states()

    team_server.prefect("work-pool", "create", "--overwrite", "heterps", "--type", "process")
    team_server.deploy()
    team_server.prefect("deployment", "run", "sweep-orphans")
    team_server.prefect("worker", "start", "--pool", "heterps", "--run-once")

    assert team_server.states().count("COMPLETED") >= 2
