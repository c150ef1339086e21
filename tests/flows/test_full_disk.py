"""A run of `train-ctr` whose workspace fills up: one line says so, whatever stumbles over it first."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from infra.workspace import HOME_VARIABLE
from tests.paths import PROJECT
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root"),
]

LIMIT_S = 180.0
SETTINGS = [
    *("--model", "ctrdnn"),
    *("--epochs", "600", "--batch-size", "128", "--scheduler", "exact", "--budget-evaluations", "64"),
    *("--provider", "local", "--device-types", "cpu-c7i", "gpu-t4"),
    *("--planned-samples", "1e9"),  # whose plan has two stages
]


@contextmanager
def small_disk(folder):
    """A file system of 60 MB; a workspace with its databases takes 7."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def keep_full(folder, process):
    """Take all that is free, and what becomes free, as another program that writes does, until the process ends."""
    with (folder / "filler").open("wb", buffering=0) as filler:

        def is_over():
            for size in (65_536, 512):
                try:
                    while True:
                        filler.write(bytes(size))
                except OSError:
                    pass
            return process.poll() is not None

        wait_for(is_over, timeout_s=LIMIT_S, what="the end of the run", poll_s=0.01)


@pytest.mark.parametrize(
    "begun",
    [
        pytest.param("runs/*/parameters.json", id="before it plans", marks=pytest.mark.weekly),
        pytest.param("runs/*/progress.json", id="while it trains", marks=pytest.mark.weekly),
    ],
)
def test_a_workspace_that_is_full_is_reported_in_one_line_with_the_way_on(
    begun, tmp_path, clicks_of_runs, workspace_of_runs
):
    with small_disk(tmp_path / "home") as home:
        workspace_of_runs(home)
        # With a Prefect server of its own, whose database is in the workspace too.
        environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
        run = subprocess.Popen(
            [sys.executable, "-m", "flows.train_ctr", "--data", clicks_of_runs, *SETTINGS],
            cwd=PROJECT,
            env={**environment, HOME_VARIABLE: str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_for(lambda: list(home.glob(begun)) or run.poll() is not None, timeout_s=LIMIT_S, what=begun)
            keep_full(home, run)
            said, errors = run.communicate(timeout=LIMIT_S)
        finally:
            with run:
                run.kill()

    assert run.returncode not in (None, 0)
    lines = errors.splitlines()
    assert len(lines) == 1, errors
    [line] = lines
    assert line.startswith("error: ")
    assert "bytes free" in line
    assert "free space there" in line
    assert "Traceback" not in said
