"""A workspace that `make serve` serves in a process of its own, with the two shells that a user has."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil
from mlflow import MlflowClient

from infra.workspace import HOME_VARIABLE, Workspace, free_loopback_port
from tests.paths import PROJECT
from tests.waiting import wait_for

PREFECT = Path(sys.executable).with_name("prefect")


def _variable(process: psutil.Process, name: str) -> str | None:
    """Return a variable of a process's environment; None of one that has ended meanwhile."""
    try:
        return process.environ().get(name)
    except psutil.Error:
        return None


class ServedWorkspace:
    """A served workspace, with the two shells that a user has.

    Processes are found by the workspace that stands in their environment, so that no other process of this machine
    is counted or touched.
    """

    def __init__(self, home: Path, *, settings: Mapping[str, str] | None = None) -> None:
        self.workspace = Workspace(root=home)
        self.home = home
        prefect_port = free_loopback_port()
        mlflow_port = next(port for port in iter(free_loopback_port, None) if port != prefect_port)
        self.api_url = f"http://127.0.0.1:{prefect_port}/api"
        self.mlflow_url = f"http://127.0.0.1:{mlflow_port}"
        # What a user's shell has: the virtual environment, the project as current directory, nothing of Prefect's.
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))
        }
        # Prefect's profiles are of the user's home.
        self.shell = {
            **clean,
            HOME_VARIABLE: str(home),
            "HOME": str(home.with_name("user")),
            "DO_NOT_TRACK": "1",
        }
        self.settings = {
            "HETERPS_PREFECT_PORT": str(prefect_port),
            "HETERPS_MLFLOW_PORT": str(mlflow_port),
            **(settings or {}),
        }
        self.output = home / "serve.out"
        home.mkdir(exist_ok=True)
        self.process = self._start()

    @property
    def sign_in(self) -> str:
        """The header Authorization of requests to both servers."""
        return f"Basic {base64.b64encode(self.workspace.password().encode()).decode()}"

    def restart(self) -> None:
        """Start `make serve` again, on the same ports; the one before must have ended."""
        assert self.process.poll() is not None
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.output.open("wb") as output:
            return subprocess.Popen(
                # A background job of a shell ignores SIGINT, and so would what these tests start.
                ["env", "--default-signal=INT", sys.executable, "-m", "flows.service.serve"],
                cwd=PROJECT,
                env={**self.shell, **self.settings},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_until_up(self) -> None:
        """Return once everything is up; what `make serve` printed is the message of a failure."""
        wait_for(self._is_up_or_dead, timeout_s=400, what="the service", poll_s=0.2)
        assert self.process.poll() is None, self.output.read_text()

    def _is_up_or_dead(self) -> bool:
        return "Start a run now" in self.output.read_text() or self.process.poll() is not None

    def command(self, *arguments: str, timeout_s: float = 800, folder: Path = PROJECT) -> str:
        """Run the literal `prefect` command in a folder."""
        done = subprocess.run(
            [str(PREFECT), *arguments],
            cwd=folder,
            env=self.shell,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.serving_log()
        return done.stdout

    def flow_runs(self, flow: str) -> list[dict[str, Any]]:
        """Return the flow runs of a flow from the server."""
        return self.ask(
            "/flow_runs/filter",
            {"flows": {"name": {"any_": [flow]}}, "sort": "EXPECTED_START_TIME_ASC"},
        )

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer of the API to a POST; asked again while it is too busy, as Prefect's client does."""
        request = urllib.request.Request(
            f"{self.api_url}{path}",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json", "authorization": self.sign_in},
        )

        def answer() -> bytes | None:
            try:
                with urllib.request.urlopen(request, timeout=10) as response:
                    return bytes(response.read())
            except urllib.error.HTTPError as error:
                if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                    raise
                return None
            except TimeoutError:
                return None

        return json.loads(wait_for(answer, what=f"an answer to {path}"))

    def heterps(self, *arguments: str) -> str:
        """Run the literal `heterps` command."""
        done = subprocess.run(
            [str(PREFECT.with_name("heterps")), *arguments],
            cwd=PROJECT,
            env=self.shell,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def serving_log(self) -> str:
        """Return what the process that runs the deployments has written."""
        path = self.workspace.logs_directory / "serving.log"
        return path.read_text() if path.exists() else ""

    def processes(self) -> list[psutil.Process]:
        """Return what runs for this workspace, but the test itself."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def nodes_of(self, run_id: str) -> list[psutil.Process]:
        """Return the processes of a run's local nodes."""
        return [process for process in self.processes() if _variable(process, "HETERPS_RUN_ID") == run_id]

    def _is_ours(self, process: psutil.Process) -> bool:
        return process.pid != os.getpid() and _variable(process, HOME_VARIABLE) == str(self.home)

    def training_record(self, run_id: str) -> Any:
        """Return MLflow's record of a training run."""
        client = MlflowClient(self.workspace.tracking_uri)
        experiment = client.get_experiment_by_name("train-ctr")
        condition = f"tags.`heterps.run_id` = '{run_id}' AND tags.`heterps.kind` = 'training'"
        [run] = client.search_runs([experiment.experiment_id], filter_string=condition)
        return run

    def stop(self) -> None:
        """Stop in order, and kill what is left."""
        # Not SIGINT, which a shell's background jobs ignore.
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(200)
        finally:
            for process in self.processes():
                process.kill()
