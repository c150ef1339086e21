"""The process of a machine that keeps the redo logs of its workers and of those of one other machine.

It lives as long as its node, so logs are there when workers have ended. Calls are pickled, on connections that begin
with a proof that both ends have the run's key; arrays travel beside them as they lie in memory.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import socket
import struct
import threading
from contextlib import suppress
from functools import partial
from multiprocessing import AuthenticationError, connection
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import numpy as np

from heterps_core.cluster import Cluster
from heterps_core.training.job import TrainingConfig
from heterps_core.training.redo.step_log import (
    DenseChange,
    LoggedWorker,
    LogSummary,
    Rows,
    StepChanges,
    StepLog,
)
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

    def state(self, generation: int, rank: int, step: int) -> tuple[list[DenseChange], dict[str, Rows]]:
        """Return the state of a worker; see `StepLog.state`."""
        with self._lock:
            return self._logs[generation, rank].state(step)


class _Channel:
    """An end of a connection, from which messages of any size are sent and read without a copy of their arrays."""

    def __init__(self, connected: Connection) -> None:
        self._connected = connected
        with socket.socket(fileno=os.dup(connected.fileno())) as same:
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: object) -> None:
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(pickled), *(buffer.raw() for buffer in buffers)]
        sizes = struct.pack(f"<q{len(parts)}q", len(parts), *(part.nbytes for part in parts))
        for part in (memoryview(sizes), *parts):
            while part.nbytes:
                part = part[os.write(self._connected.fileno(), part) :]

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            EOFError: The other end sends no more.
        """
        (num_parts,) = struct.unpack("<q", self._read(8))
        pickled, *buffers = map(self._read, struct.unpack(f"<{num_parts}q", self._read(8 * num_parts)))
        return pickle.loads(pickled, buffers=buffers)

    def _read(self, num_bytes: int) -> memoryview:
        buffer = np.empty(num_bytes, dtype=np.uint8).data
        rest = buffer
        while rest.nbytes:
            num_read = os.readv(self._connected.fileno(), [rest])
            if not num_read:
                raise EOFError("the connection has ended")
            rest = rest[num_read:]
        return buffer


class Keeper:
    """The keeper of a node; a process only once it is needed.

    Args:
        host: Address at which the other nodes reach this one.
        key: The run's.
    """

    def __init__(self, host: str, *, key: bytes) -> None:
        self._host, self._key = host, key
        self.process: multiprocessing.process.BaseProcess | None = None
        self.address: str | None = None
        """Host and port; None where there is no process."""

    def start(self) -> None:
        """Start the process, where it does not run yet; where it cannot, the log says so."""
        if self.process is not None:
            return
        context = multiprocessing.get_context("forkserver")
        here, there = context.Pipe()
        self.process = context.Process(target=_keep, args=(self._host, self._key, there), daemon=True)
        try:
            self.process.start()
            there.close()
            self.address = here.recv()
        except (OSError, EOFError) as error:
            logger.warning("steps are not logged on %s: %s", self._host, error or type(error).__name__)

    def close(self) -> None:
        """End the process, where there is one."""
        if self.process is not None and self.process.pid is not None:
            self.process.kill()
            self.process.join()


def connect(place: KeeperPlace, *, key: bytes) -> StepLogs:
    """Return the logs of a keeper; a stand-in whose methods call those of the process.

    Raises:
        OSError: It is not there.
        AuthenticationError: It has another key.
    """
    host, _, port = place.address.rpartition(":")
    if not host:
        raise ConnectionError("there is no keeper")
    return cast(StepLogs, _Calls(_Channel(connection.Client((host, int(port)), authkey=key))))


class _Calls:
    def __init__(self, channel: _Channel) -> None:
        self._channel = channel

    def __getattr__(self, method: str) -> partial[Any]:
        return partial(self._call, method)

    def _call(self, method: str, *arguments: object) -> Any:
        self._channel.send((method, arguments))
        return self._channel.receive()


def _keep(host: str, key: bytes, told: Connection) -> None:
    """Answer calls for as long as the node lives."""
    _end_with_node()
    logs = StepLogs()
    with connection.Listener((host, 0), backlog=64) as listener:
        address, port = cast(tuple[str, int], listener.address)
        told.send(f"{address}:{port}")
        while True:
            connected = listener.accept()
            threading.Thread(target=_answer, args=(logs, connected, key), daemon=True).start()


def _answer(logs: StepLogs, connected: Connection, key: bytes) -> None:
    """Answer the calls of one connection, whose other end has the key, to its end."""
    with connected, suppress(OSError, EOFError, AuthenticationError):
        connection.deliver_challenge(connected, key)
        connection.answer_challenge(connected, key)
        channel = _Channel(connected)
        while True:
            method, arguments = channel.receive()
            channel.send(getattr(logs, method)(*arguments))


def _end_with_node() -> None:
    """Let this process end where its node does, however that happens."""
    node = multiprocessing.parent_process()
    assert node is not None

    def watch() -> None:
        connection.wait([node.sentinel])
        os._exit(0)

    threading.Thread(target=watch, name="node", daemon=True).start()
