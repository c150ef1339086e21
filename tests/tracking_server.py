"""A real MLflow server on a loopback port, which can be killed and started again at its address."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from infra.workspace import answers, free_loopback_port

START_LIMIT_S = 400.0


class TrackingServer:
    """A server that runs from here on.

    Args:
        folder: Where it keeps its database and what comes with runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_loopback_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start it and return once it answers."""
        stores = [
            *("--backend-store-uri", f"sqlite:///{self.folder}/store.db"),
            *("--artifacts-destination", str(self.folder / "artifacts")),
        ]
        address = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *address, *stores],
            env={
                **os.environ,
                "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
                "MLFLOW_DISABLE_TELEMETRY": "true",
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_LIMIT_S
        while not answers(f"{self.url}/health", timeout_s=1.0):
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def stop(self) -> None:
        """Kill it without a warning; nothing happens where it is killed already."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
