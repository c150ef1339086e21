"""Duties of every program on a node beside its work: it finds its name, gives signs of life, and reports its end.

A spot instance or a job of a batch system gets a notice two minutes before it ends: time enough to ask all workers
for a checkpoint and an end. Without it, the run would lose the steps since the last checkpoint, and notice the loss
only by a silence. The flow sees why training ended and goes on with other machines.

It needs to know where the run directory is, and which node of the cluster this is: by a variable, or by the id of
the machine that it runs on, as the machines of a fleet get the same variables and learn their names from
cluster.json.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import FrameType

from heterps_core.cluster import Cluster, Node
from heterps_core.errors import ConfigurationError
from heterps_core.instance_metadata import InstanceMetadata
from heterps_core.training.node import (
    BUCKET_HEARTBEAT_INTERVAL_S,
    DRY_RUN_VARIABLE,
    HEARTBEAT_INTERVAL_S,
    KIND_VARIABLE,
    NODE_ID_VARIABLE,
    NOTICE_S,
    OWN_DISKS_VARIABLE,
    RUN_DIRECTORY_VARIABLE,
    RUN_KEY_VARIABLE,
)
from heterps_core.training.node.host_memory import available_bytes, total_bytes
from heterps_core.training.step_metrics import ProcessReport, write_process_report
from heterps_core.training.storage.run_directory import CLUSTER, RunDirectory
from heterps_core.training.storage.verified_files import find_signed_json

logger = logging.getLogger(__name__)

GENERATION_VARIABLE = "HETERPS_GENERATION"
EXIT = "exit"
HEARTBEAT = "heartbeat.json"
LEAVING = "leaving.json"
NODES = "nodes"

NOTICE_INTERVAL_S = 5.0
"""As AWS recommends for the notice of an interruption."""

CLUSTER_TIMEOUT_S = 600.0
"""How long a node waits for cluster.json: the slowest instance of a fleet may boot for minutes."""

_CLUSTER_POLL_S = 0.2
BUCKET_CLUSTER_POLL_S = 2.0
NEXT_CLUSTER_POLL_S = 0.25
"""Between two looks for the next generation, for which a node waits some seconds."""


def node_key(node_id: str, name: str) -> str:
    """Return the key of a node's file in the run directory."""
    return f"{NODES}/{node_id}/{name}"


def exit_key(node_id: str, generation: int = 1) -> str:
    """Return the key of what a node tells of the end of its workers of a generation."""
    return node_key(node_id, f"{EXIT}.json" if generation == 1 else f"{EXIT}-{generation}.json")


def own_run_directory() -> RunDirectory:
    """Return where this node meets the flow's host, with the run's key."""
    secret = bytes.fromhex(os.environ.get(RUN_KEY_VARIABLE, ""))
    return RunDirectory(os.environ[RUN_DIRECTORY_VARIABLE], secret=secret)


def wait_for_cluster(run: RunDirectory) -> Cluster:
    """Return the first cluster, once the flow has written who takes part.

    Raises:
        ConfigurationError: It has not in `CLUSTER_TIMEOUT_S`.
    """
    deadline_s = time.monotonic() + CLUSTER_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if (cluster := read_cluster(run)) is not None:
            return cluster
        time.sleep(_CLUSTER_POLL_S if run.is_local else BUCKET_CLUSTER_POLL_S)
    raise ConfigurationError(
        f"{CLUSTER} must appear in {run.location} within {CLUSTER_TIMEOUT_S:.0f} s of a node's start, but did not; "
        f"the flow that launched the node has probably ended"
    )


def read_cluster(run: RunDirectory, *, after_generation: int = 0) -> Cluster | None:
    """Return the newest cluster; None where its generation does not follow another one.

    Raises:
        DamagedFileError: It is not as the flow wrote it.
    """
    document = find_signed_json(run, CLUSTER)
    cluster = None if document is None else Cluster.from_json(document)
    return cluster if cluster is not None and cluster.generation > after_generation else None


def find_own_node(cluster: Cluster) -> Node | None:
    """Return which node this is: the named one, or the one on this machine; None where it is no part of the cluster.

    Raises:
        ConfigurationError: There is neither a name nor a metadata service.
    """
    node_id = os.environ.get(NODE_ID_VARIABLE)
    own = node_id or InstanceMetadata().instance_id()
    names = ((node.node_id if node_id else node.provider_instance_id, node) for node in cluster.nodes)
    return next((node for name, node in names if name == own), None)


def own_node(cluster: Cluster) -> Node:
    """Return which node this is; see `find_own_node`.

    Raises:
        ConfigurationError: It is no part of the cluster.
    """
    if (node := find_own_node(cluster)) is None:
        names = ", ".join(node.node_id for node in cluster.nodes)
        raise ConfigurationError(f"this node must be one of the cluster's: {names}")
    return node


def runs_here_as_dry_run() -> bool:
    """Tell whether this node is a process on the flow's machine, and not the machine that it stands for."""
    return os.environ.get(DRY_RUN_VARIABLE, "1") == "1"


def own_disks() -> tuple[str, ...]:
    """Return the folders on this machine's own disks, one each."""
    return tuple(filter(None, os.environ.get(OWN_DISKS_VARIABLE, "").split(":")))


def is_machine() -> bool:
    """Tell whether this node is a machine of its own, which its cloud may preempt."""
    return os.environ.get(KIND_VARIABLE) == "machine"


@contextmanager
def repeated(action: Callable[[], object], *, interval_s: float, name: str) -> Iterator[None]:
    """Do something on a thread while the block runs, again and again with so many seconds between."""
    ended = threading.Event()

    def repeat() -> None:
        action()
        while not ended.wait(interval_s):
            action()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def heartbeat(run: RunDirectory, node_id: str) -> Iterator[None]:
    """Write a sign of life every few seconds while the block runs."""

    def beat() -> None:
        sign = {"beat_at_s": time.time(), "pid": os.getpid()}
        memory = {"free_bytes": available_bytes(), "total_bytes": total_bytes()}
        try:
            run.write_json(node_key(node_id, HEARTBEAT), {**sign, **memory})
        except OSError as error:
            # A full disk may have room again; those who do the work report what it costs.
            logger.warning("no sign of life could be written: %s", error)

    interval_s = HEARTBEAT_INTERVAL_S if run.is_local else BUCKET_HEARTBEAT_INTERVAL_S
    with repeated(beat, interval_s=interval_s, name="heartbeat"):
        yield


class SignalledNotice:
    """The notice of a batch system: it sends SIGUSR1 some time before it ends a job."""

    def __init__(self) -> None:
        self._at: str | None = None
        signal.signal(signal.SIGUSR1, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._at = self._at or (datetime.now(UTC) + timedelta(seconds=NOTICE_S)).isoformat(timespec="seconds")

    def interrupted_at(self) -> str | None:
        """Return when the node will end; see `watch_notices`."""
        return self._at


@contextmanager
def watch_notices(
    run: RunDirectory, node_id: str, service: SignalledNotice | InstanceMetadata
) -> Iterator[None]:
    """Ask for notices while the block runs, and pass them on."""
    noted: str | None = None

    def look() -> None:
        nonlocal noted
        try:
            at = service.interrupted_at()
            if at is None or at == noted:
                return
            noted = at
            logger.warning("node %s must end at %s", node_id, at)
            run.write_json(node_key(node_id, LEAVING), {"at": at, "noticed_at_s": time.time()})
            run.request_stop()
        except (OSError, ValueError, KeyError) as problem:
            logger.warning("notices could not be read, trying again: %s", problem)

    with repeated(look, interval_s=NOTICE_INTERVAL_S, name="notices"):
        yield


def leaving_nodes(run: RunDirectory) -> dict[str, str]:
    """Return the nodes that got a notice of an interruption, with the time at which each ends."""
    found = {}
    for node_id in run.names(NODES):
        notice = run.read_json(node_key(node_id, LEAVING))
        if notice is not None:
            found[node_id] = notice["at"]
    return found


def write_end(
    run: RunDirectory,
    node_id: str,
    *,
    exit_status: int,
    log_tail: str,
    is_mistake: bool = False,
    generation: int = 1,
) -> None:
    """Say how a node ended, or its workers of a generation, and what it asked of the bucket.

    Args:
        exit_status: 0 for a good end.
        is_mistake: That says all: another machine would end the same way.
    """
    if not run.is_local:
        write_process_report(run, f"node-{node_id}", ProcessReport(storage=run.usage))
    run.write_last_words(
        exit_key(node_id, generation),
        {
            "exit_status": exit_status,
            "ended_at_s": time.time(),
            "log_tail": log_tail,
            "is_mistake": is_mistake,
        },
    )
