"""The program of a training node: it waits for its neighbours' names, starts workers, and reports how they end.

Started by the bootstrap script of every provider (`python -m heterps_core.training.node`); how it learns its name and
shows that it lives is in `node_life.py`. Where its workers end before the training does, because they failed or those
of another node did, the node stays: the flow names the next generation, of which it may be a part again.
"""

from __future__ import annotations

import logging
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from heterps_core.cluster import Cluster, Node
from heterps_core.errors import HeterpsError
from heterps_core.hardware import Market
from heterps_core.instance_metadata import InstanceMetadata, interface_of
from heterps_core.training.job import TrainingJob
from heterps_core.training.node import NODE_ID_VARIABLE, OWN_DISKS_VARIABLE
from heterps_core.training.node.host_memory import check_workers_fit
from heterps_core.training.node.node_life import (
    BUCKET_CLUSTER_POLL_S,
    GENERATION_VARIABLE,
    NEXT_CLUSTER_POLL_S,
    SignalledNotice,
    find_own_node,
    heartbeat,
    is_machine,
    node_key,
    own_run_directory,
    read_cluster,
    runs_here_as_dry_run,
    wait_for_cluster,
    watch_notices,
    write_end,
)
from heterps_core.training.node.worker_life import SIGNS_VARIABLE, workers_watched
from heterps_core.training.node.worker_processes import prepare_to_fork, run_workers
from heterps_core.training.storage.run_directory import JOB, RunDirectory
from heterps_core.training.storage.verified_files import read_signed_json
from heterps_core.transport.rank_layout import START_LIMIT_S

logger = logging.getLogger(__name__)


def main() -> int:
    """Run one node to its end; returns the exit status of its workers."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    run = own_run_directory()
    # Meanwhile the flow names the others.
    prepare_to_fork()
    with _ending_signals() as is_ending:
        try:
            place = _wait_for_place(run, wait_for_cluster(run).generation - 1, is_ending)
        except HeterpsError as error:
            # The node is not part of the cluster, so its files are not read: this is for its own log.
            logger.error("%s", error)
            return error.exit_status
        if place is None:
            return 0
        cluster, node = place
        with heartbeat(run, node.node_id), _notices(run, node):
            while True:
                status = _run_generation(run, cluster, node, is_ending)
                if run.is_trained() or not (place := _wait_for_place(run, cluster.generation, is_ending)):
                    return status
                cluster, node = place


def _notices(run: RunDirectory, node: Node) -> AbstractContextManager[None]:
    """Watch for the notice of a cloud, which spot machines get, or of a batch system."""
    if not is_machine():
        return watch_notices(run, node.node_id, SignalledNotice())
    is_on_spot = node.market is Market.SPOT
    return watch_notices(run, node.node_id, InstanceMetadata()) if is_on_spot else nullcontext()


def _run_generation(run: RunDirectory, cluster: Cluster, node: Node, is_ending: threading.Event) -> int:
    """Run the workers of one generation to their end and tell it; returns their exit status."""
    is_mistake = False
    try:
        job = TrainingJob.from_json(read_signed_json(run, JOB))
        status, log_tail = _run_workers(run, cluster, node, job, is_ending)
    except HeterpsError as error:
        logger.error("%s", error)
        status, log_tail, is_mistake = error.exit_status, str(error), True
    write_end(
        run,
        node.node_id,
        exit_status=status,
        log_tail=log_tail,
        is_mistake=is_mistake,
        generation=cluster.generation,
    )
    return status


def _is_followed(run: RunDirectory, generation: int) -> Callable[[], bool]:
    """Return a question: does another generation follow one in which workers still wait for those of a lost node?

    Once all have met, they see one another's end. Before, they may wait for minutes, and as long it is looked for.
    """
    next_look_s = time.monotonic()
    until_s = next_look_s + START_LIMIT_S

    def is_there() -> bool:
        nonlocal next_look_s
        now_s = time.monotonic()
        if not next_look_s <= now_s < until_s:
            return False
        next_look_s = now_s + BUCKET_CLUSTER_POLL_S
        return read_cluster(run, after_generation=generation) is not None

    return is_there


def _wait_for_place(
    run: RunDirectory, generation: int, is_ending: threading.Event
) -> tuple[Cluster, Node] | None:
    """Return the place of this node in a later generation than one; None where the node is to end.

    Others may take its place, and a spare node takes that of a lost one. There is no limit: a flow that will name no
    further generation ends its machines, and a dead one no longer renews their leases.
    """
    while not is_ending.is_set():
        if cluster := read_cluster(run, after_generation=generation):
            if node := find_own_node(cluster):
                return cluster, node
            generation = cluster.generation
        is_ending.wait(NEXT_CLUSTER_POLL_S)
    return None


def _worker_environments(
    cluster: Cluster, node: Node, job: TrainingJob, *, signs: Path
) -> list[dict[str, str]]:
    """Return the variables of each worker of a node.

    Ranks are numbered by stage and replica; the first worker of the node at the rendezvous holds the store there.
    """
    shared = {
        NODE_ID_VARIABLE: node.node_id,
        GENERATION_VARIABLE: str(cluster.generation),
        SIGNS_VARIABLE: str(signs),
        "WORLD_SIZE": str(sum(other.num_workers for other in cluster.nodes)),
    }
    if node.own_disk_bytes == 0:
        # Those that it has may be too small: rows go to its volume.
        shared[OWN_DISKS_VARIABLE] = ""
    interface = "lo" if cluster.rendezvous.startswith("127.") else interface_of(node.address)
    if interface is not None:
        # Otherwise gloo binds to what the host name resolves to, which may be nothing, or what no other node reaches.
        shared["GLOO_SOCKET_IFNAME"] = interface
        shared["NCCL_SOCKET_IFNAME"] = f"={interface}"
    first = sum(job.replicas_per_stage[: node.stage])
    return [
        {**shared, "LOCAL_RANK": str(slot), "RANK": str(first + replica)}
        for slot, replica in enumerate(cluster.replicas_of(node))
    ]


def _run_workers(
    run: RunDirectory, cluster: Cluster, node: Node, job: TrainingJob, is_ending: threading.Event
) -> tuple[int, str]:
    """Run the workers to their end, where they fit into memory; returns exit status and the end of their log."""
    if job.worker_bytes and not runs_here_as_dry_run():
        check_workers_fit(
            {f"stage {node.stage}": [job.worker_bytes[node.stage]] * node.num_workers},
            where=f"{node.node_id} ({node.instance_type})",
        )
    log_key = node_key(node.node_id, "workers.log")
    with tempfile.TemporaryDirectory(prefix="heterps-node-") as folder:
        log_path = run.path(log_key) if run.is_local else Path(folder) / "workers.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.touch()
        signs = Path(folder) / "signs"
        is_followed = _is_followed(run, cluster.generation)
        positions = [(node.stage, replica) for replica in cluster.replicas_of(node)]
        with workers_watched(run, signs, positions):
            status = run_workers(
                _worker_environments(cluster, node, job, signs=signs),
                log_path=log_path,
                is_over=lambda: is_ending.is_set() or is_followed(),
            )
        content = log_path.read_bytes()
    if not run.is_local:
        run.write_bytes(log_key, content)
    return status, content[-4000:].decode(errors="replace")


@contextmanager
def _ending_signals() -> Iterator[threading.Event]:
    """Yield what a request to end sets."""
    is_ending = threading.Event()

    def note(signum: int, frame: FrameType | None) -> None:
        is_ending.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield is_ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
