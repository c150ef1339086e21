"""Runs of whole nights in processes of their own, as people start them."""

import os
import subprocess
import sys
from contextlib import contextmanager

from prefect.settings import PREFECT_API_URL

from infra.workspace import HOME_VARIABLE
from tests.paths import PROJECT


@contextmanager
def started_runs(workspace, *shared):
    """Yield a function that starts a program with further arguments; what it started is ended, however a test ends.

    Args:
        shared: The arguments of Python in each run, such as -m and a module.
    """
    runs = []

    def started(*arguments):
        run = subprocess.Popen(
            [sys.executable, *shared, *arguments],
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
        runs.append(run)
        return run

    try:
        yield started
    finally:
        for run in runs:
            run.kill()
            run.communicate()
