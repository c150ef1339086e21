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


@pytest.mark.weekly
def test_a_process_worker_runs_a_deployment_to_its_end(tmp_path):
    port = free_loopback_port()
    api_url = f"http://127.0.0.1:{port}/api"
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))
    }
    environment = {
        **clean,
        **project_environment(Workspace(root=tmp_path / "home").create()),
        "PREFECT_API_URL": api_url,
        "PREFECT_CLI_PROMPT": "false",
    }
    log = (tmp_path / "server.log").open("w")
    server = subprocess.Popen(
        [str(PREFECT), "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui"],
        cwd=PROJECT,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
    )

    def prefect(*arguments):
        done = subprocess.run(
            [str(PREFECT), *arguments],
            cwd=PROJECT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        wait_for(
            lambda: server.poll() is not None or answers(f"{api_url}/health", timeout_s=1.0),
            timeout_s=90,
            what="the server",
            poll_s=0.2,
        )
        assert server.poll() is None
        prefect("work-pool", "create", "heterps", "--type", "process")
        prefect("--no-prompt", "deploy", "--all")
        prefect("deployment", "run", "sweep-orphans")
        prefect("worker", "start", "--pool", "heterps", "--run-once")
        body = json.dumps({"flows": {"name": {"any_": ["sweep-orphans"]}}, "sort": "END_TIME_DESC"}).encode()
        request = urllib.request.Request(
            f"{api_url}/flow_runs/filter", data=body, headers={"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            states = [run["state_type"] for run in json.load(response)]
    finally:
        server.terminate()
        server.wait(30)
        log.close()

    assert "COMPLETED" in states
    assert (tmp_path / "home" / "ledger.sqlite").exists()
