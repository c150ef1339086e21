"""The worker processes of a node, forked from one that has imported all that they need.

A new interpreter spends seconds on importing torch, a fork begins in some milliseconds. So the workers of a node end
together, however one of them failed, and the next generation gets new ones, in which no thread, connection or message
of the one before is left.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path

from heterps_core.core_use import ONE_CORE, THREADS_VARIABLE

_IMPORTED_BEFORE = ("heterps_core.training.worker", "torch.fx.experimental.symbolic_shapes")
"""The second is what the first backward pass of a process imports, for 0.3 s."""

_LONGEST_FOLDER = 60
"""Characters of the folder of a socket, whose whole name has at most 107; multiprocessing adds some 30."""

_SHORT_FOLDER = "/tmp"

LOOK_INTERVAL_S = 0.25
_SHUTDOWN_LIMIT_S = 5.0
"""Time for a worker to end when it is asked to; one that stands still is then killed."""


def prepare_to_fork() -> None:
    """Let the process that workers are forked from begin to import; returns at once.

    Workers may open as many files as the machine's hard limit allows: a worker keeps a connection to each other one.
    """
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    multiprocessing.set_forkserver_preload(list(_IMPORTED_BEFORE))
    asked, threads = tempfile.tempdir, os.environ.get(THREADS_VARIABLE)
    if len(tempfile.gettempdir()) > _LONGEST_FOLDER:
        tempfile.tempdir = _SHORT_FOLDER
    os.environ[THREADS_VARIABLE] = ONE_CORE
    try:
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = asked
        if threads is None:
            del os.environ[THREADS_VARIABLE]
        else:
            os.environ[THREADS_VARIABLE] = threads


def run_workers(
    environments: Sequence[Mapping[str, str]], *, log_path: Path, is_over: Callable[[], bool]
) -> int:
    """Run a node's workers until all have ended or one has failed, then end the others.

    Args:
        environments: Variables of each worker, beside those of this process.
        log_path: File that they all write to.
        is_over: Tells whether to end them all; asked several times a second.

    Returns:
        0 where all came to a good end, else the exit status of one that failed first; 128 + n for signal n.
    """
    context = multiprocessing.get_context("forkserver")
    workers = [
        context.Process(target=_work, args=(dict(environment), str(log_path))) for environment in environments
    ]
    try:
        for worker in workers:
            worker.start()
        while not is_over():
            failed = [worker.exitcode for worker in workers if worker.exitcode]
            living = [worker.sentinel for worker in workers if worker.exitcode is None]
            if failed or not living:
                return 0 if not failed else failed[0] if failed[0] > 0 else 128 - failed[0]
            connection.wait(living, timeout=LOOK_INTERVAL_S)
        return 1
    finally:
        started = [worker for worker in workers if worker.pid is not None]
        for worker in started:
            worker.terminate()
        for worker in started:
            worker.join(_SHUTDOWN_LIMIT_S)
        for worker in started:
            worker.kill()
            worker.join()


def _work(environment: Mapping[str, str], log_path: str) -> None:
    """Be a worker: what a fork of the process that has imported it does."""
    os.environ.update(environment)
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    from heterps_core.training.worker import main

    sys.exit(main())
