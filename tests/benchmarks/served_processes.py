"""Which processes of a served workspace are its services, and which are too many."""

from __future__ import annotations

from collections import Counter

import psutil

from tests.served_workspace import ServedWorkspace

SERVICES = {
    "flows.service.guarded_servers prefect": 1,
    "flows.service.guarded_servers mlflow": 1,
    "flows.service.deployments": 1,
    "flows.service.serve": 1,
}
"""Processes of a served workspace in which nothing runs."""


def surplus(served: ServedWorkspace) -> list[str]:
    """Return the processes of a workspace that are not its services, or more of one than there should be."""
    left = Counter(SERVICES)
    found = []
    for process in served.processes():
        kind = kind_of(process)
        # Children of a service, such as MLflow's worker, are its own.
        if kind is None and has_service_above(process):
            continue
        left[kind or ""] -= 1
        if left[kind or ""] < 0:
            found.append(f"process {process.pid} is left: {' '.join(words_of(process))[:80]}")
    return found


def has_service_above(process: psutil.Process) -> bool:
    """Tell whether a process was started by a service that runs no flows."""
    try:
        return any("guarded_servers" in (kind_of(each) or "") for each in process.parents())
    except psutil.Error:
        return False


def kind_of(process: psutil.Process) -> str | None:
    """Return which service a process is, None where it is none."""
    words = " ".join(words_of(process)[1:4]).removeprefix("-m ")
    return next((name for name in SERVICES if words.startswith(name)), None)


def words_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty where it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
