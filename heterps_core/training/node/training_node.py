"""What runs on a node for as long as it trains: waits for its neighbours' names, starts torchrun, tells how it goes.

Started by the bootstrap script of every provider (`python -m heterps_core.training.node`); how it learns its name and
shows that it lives is in `node_life.py`.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from heterps_core.cluster import Cluster, Node
from heterps_core.errors import HeterpsError
from heterps_core.hardware import Market
from heterps_core.instance_metadata import interface_of
from heterps_core.training.job import TrainingJob
from heterps_core.training.node.host_memory import check_workers_fit
from heterps_core.training.node.node_life import (
    NODE_ID_VARIABLE,
    heartbeat,
    is_machine,
    node_key,
    own_node,
    own_run_directory,
    runs_here_as_dry_run,
    wait_for_cluster,
    watch_notices,
    write_end,
)
from heterps_core.training.node.worker_life import SIGNS_VARIABLE, workers_watched
from heterps_core.training.storage.run_directory import JOB, RunDirectory

logger = logging.getLogger(__name__)

MAX_RESTARTS = 1
"""Times that torchrun restarts the workers after a failure; they go on from the newest checkpoint."""

SHUTDOWN_LIMIT_S = 5
"""Time for a worker to end when it is asked to; one that stands still is then killed."""


def main() -> int:
    """Run one node to its end; returns the exit status of its workers."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    run = own_run_directory()
    try:
        cluster = wait_for_cluster(run)
        node = own_node(cluster)
    except HeterpsError as error:
        # Nobody knows this node by name, so nobody reads what it writes: this is for its own log.
        logger.error("%s", error)
        return error.exit_status
    can_be_preempted = is_machine() and node.market is Market.SPOT
    notices = watch_notices(run, node.node_id) if can_be_preempted else nullcontext()
    with heartbeat(run, node.node_id), notices:
        is_mistake = False
        try:
            job = TrainingJob.from_json(run.require_json(JOB))
            status, log_tail = _run_workers(run, cluster, node, job)
        except HeterpsError as error:
            logger.error("%s", error)
            status, log_tail, is_mistake = error.exit_status, str(error), True
    write_end(run, node.node_id, exit_status=status, log_tail=log_tail, is_mistake=is_mistake)
    return status


def torchrun_command(cluster: Cluster, node: Node) -> list[str]:
    """Return the command that starts the workers of a node."""
    num_nodes = len(cluster.nodes)
    rendezvous_conf = "join_timeout=300,last_call_timeout=1"
    if not _is_loopback(cluster):
        # torchrun would ask the name service whether the rendezvous is here, and a machine may not know its own name.
        is_host = cluster.rendezvous.startswith(f"{node.address}:")
        rendezvous_conf += f",is_host={int(is_host)}"
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={num_nodes}",
        f"--nproc-per-node={node.num_workers}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={cluster.rendezvous}",
        f"--rdzv-id={cluster.run_id}",
        f"--rdzv-conf={rendezvous_conf}",
        f"--local-addr={node.address}",
        f"--max-restarts={MAX_RESTARTS}",
        "--monitor-interval=0.2",
        f"--shutdown-timeout={SHUTDOWN_LIMIT_S}",
        *("-m", "heterps_core.training.worker"),
    ]


def worker_environment(cluster: Cluster, node: Node, job: TrainingJob) -> dict[str, str]:
    """Return the environment of torchrun and its workers."""
    environment = dict(os.environ)
    environment[NODE_ID_VARIABLE] = node.node_id
    environment["OMP_NUM_THREADS"] = str(job.config.num_threads)
    # With the shared store most killed runs never came back; measured in docs/LOG.md.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    interface = "lo" if _is_loopback(cluster) else interface_of(node.address)
    if interface is not None:
        # Otherwise gloo binds to what the host name resolves to, which may be nothing, or what no other node reaches.
        environment["GLOO_SOCKET_IFNAME"] = interface
    return environment


def _is_loopback(cluster: Cluster) -> bool:
    return cluster.rendezvous.startswith("127.")


def _run_workers(run: RunDirectory, cluster: Cluster, node: Node, job: TrainingJob) -> tuple[int, str]:
    """Run torchrun to its end, where its workers fit into memory; returns its exit status and the end of its log."""
    if job.worker_bytes and not runs_here_as_dry_run():
        check_workers_fit(
            {f"stage {node.stage}": [job.worker_bytes[node.stage]] * node.num_workers},
            where=f"{node.node_id} ({node.instance_type})",
        )
    log_key = node_key(node.node_id, "workers.log")
    with tempfile.TemporaryDirectory(prefix="heterps-node-") as folder:
        log_path = run.path(log_key) if run.is_local else Path(folder) / "workers.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        signs = Path(folder) / "signs"
        positions = [(node.stage, replica) for replica in cluster.replicas_of(node)]
        with log_path.open("ab") as log, workers_watched(run, signs, positions):
            process = subprocess.Popen(
                torchrun_command(cluster, node),
                env={**worker_environment(cluster, node, job), SIGNS_VARIABLE: str(signs)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            with _forward_signals(process):
                status = process.wait()
        content = log_path.read_bytes()
    if not run.is_local:
        run.write_bytes(log_key, content)
    return status, content[-4000:].decode(errors="replace")


@contextmanager
def _forward_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass a request to end on to torchrun, which ends its workers."""

    def forward(signum: int, frame: FrameType | None) -> None:
        process.send_signal(signum)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
