"""The process of a machine that keeps the redo logs of its workers and of those of one other machine.

It lives as long as its node, so logs are there when workers have ended. It is a server of multiprocessing: calls are
pickled, on connections that begin with a proof that both ends have the run's key.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from multiprocessing import connection
from multiprocessing.managers import BaseManager
from typing import NamedTuple

from heterps_core.cluster import Cluster
from heterps_core.training.job import TrainingConfig
from heterps_core.training.redo.step_log import LoggedWorker, LogSummary, Rows, StepChanges, StepLog, Values
from heterps_core.training.storage.run_directory import RunDirectory

logger = logging.getLogger(__name__)

KEEPER_VARIABLE = "HETERPS_KEEPER"
"""Names host and port of the keeper on a worker's machine; not set where steps are not logged."""


def logs_steps(config: TrainingConfig, cluster: Cluster, run: RunDirectory) -> bool:
    """Tell whether the workers of a generation log their steps: there is another machine to keep them.

    Without a key of the run anyone on this machine could send what is unpickled here.
    """
    is_in_memory = config.embedding_memory_bytes is None
    return config.redo_log and is_in_memory and len(cluster.nodes) > 1 and bool(run.secret)


class KeeperPlace(NamedTuple):
    """Where the keeper of a worker's machine is."""

    node_id: str
    address: str
    """Host and port; empty where there is none."""


class StepLogs:
    """The logs of a keeper."""

    def __init__(self) -> None:
        self._logs: dict[tuple[int, int], StepLog] = {}
        """By generation and rank."""

        self._lock = threading.Lock()

    def begin(self, worker: LoggedWorker, step: int) -> None:
        """Begin the log of a worker behind a step; those of generations before are not needed any more."""
        with self._lock:
            self._logs = {key: log for key, log in self._logs.items() if key[0] >= worker.generation}
            self._logs[worker.generation, worker.rank] = StepLog(worker, step)

    def add(self, generation: int, rank: int, changes: StepChanges, complete_step: int | None) -> None:
        """Take in what a worker changed in a step; see `StepLog.add`. One of a generation before is not heard."""
        with self._lock:
            log = self._logs.get((generation, rank))
            if log is not None:
                log.add(changes, complete_step=complete_step)

    def summaries(self) -> list[LogSummary]:
        """Return which states can be had."""
        with self._lock:
            return [each for log in self._logs.values() if (each := log.summary()) is not None]

    def state(self, generation: int, rank: int, step: int) -> tuple[Values, dict[str, Rows]]:
        """Return the state of a worker; see `StepLog.state`."""
        with self._lock:
            return self._logs[generation, rank].state(step)


_LOGS = StepLogs()


def _logs() -> StepLogs:
    return _LOGS


class _Manager(BaseManager):
    pass


_Manager.register("logs", callable=_logs, exposed=("begin", "add", "summaries", "state"))


class Keeper:
    """The keeper of a node; a process only once it is needed.

    Args:
        host: Address at which the other nodes reach this one.
        key: The run's.
    """

    def __init__(self, host: str, *, key: bytes) -> None:
        self._host, self._key = host, key
        self._manager: _Manager | None = None

    def start(self) -> None:
        """Start the process, where it does not run yet; where it cannot, the log says so."""
        if self._manager is not None:
            return
        context = multiprocessing.get_context("forkserver")
        manager = _Manager(address=(self._host, 0), authkey=self._key, ctx=context)
        try:
            manager.start(initializer=_end_with_node)
        except (OSError, EOFError) as error:
            logger.warning("steps are not logged on %s: %s", self._host, error or type(error).__name__)
        else:
            self._manager = manager

    @property
    def address(self) -> str | None:
        """Host and port; None where there is no process."""
        if self._manager is None:
            return None
        host, port = self._manager.address  # type: ignore[str-unpack, misc]
        return f"{host}:{port}"

    def close(self) -> None:
        """End the process, where there is one."""
        if self._manager is not None:
            self._manager.shutdown()


def connect(place: KeeperPlace, *, key: bytes) -> StepLogs:
    """Return the logs of a keeper; a stand-in whose methods call those of the process.

    Raises:
        OSError: It is not there.
        AuthenticationError: It has another key.
    """
    host, _, port = place.address.rpartition(":")
    if not host:
        raise ConnectionError("there is no keeper")
    manager = _Manager(address=(host, int(port)), authkey=key)
    manager.connect()
    logs: StepLogs = manager.logs()  # type: ignore[attr-defined]
    return logs


def _end_with_node() -> None:
    """Let this process end where its node does, however that happens."""
    node = multiprocessing.parent_process()
    assert node is not None

    def watch() -> None:
        connection.wait([node.sentinel])
        os._exit(0)

    threading.Thread(target=watch, name="node", daemon=True).start()
