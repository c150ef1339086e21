"""What runs on a node for as long as it trains: waits for its neighbours' names, starts torchrun, tells how it goes.

Started by the bootstrap script of every provider (`python -m heterps_core.training.node`). It needs two environment
variables: where the run directory is, and which node of the cluster this is.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from heterps_core.cluster import Cluster, Node
from heterps_core.errors import ConfigurationError, HeterpsError
from heterps_core.training.job import TrainingJob
from heterps_core.training.run_directory import CLUSTER, DATA, JOB, RunDirectory

logger = logging.getLogger(__name__)

RUN_DIRECTORY_VARIABLE = "HETERPS_RUN_DIR"
NODE_ID_VARIABLE = "HETERPS_NODE_ID"
DATASET_VARIABLE = "HETERPS_DATASET"

HEARTBEAT_INTERVAL_S = 2.0
CLUSTER_TIMEOUT_S = 600.0
"""How long a node waits for cluster.json: the slowest instance of a fleet may boot for minutes."""

CLUSTER_POLL_S = 0.2

MAX_RESTARTS = 1
"""Times that torchrun restarts the workers after a failure; they go on from the newest checkpoint."""

SHUTDOWN_LIMIT_S = 5
"""Time for a worker to end when it is asked to; one that stands still is then killed."""


def node_key(node_id: str, name: str) -> str:
    """Return the key of a node's file in the run directory."""
    return f"nodes/{node_id}/{name}"


def main() -> int:
    """Run one node to its end; returns the exit status of its workers."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    run = RunDirectory(os.environ[RUN_DIRECTORY_VARIABLE])
    node_id = os.environ[NODE_ID_VARIABLE]
    with _heartbeat(run, node_id):
        try:
            cluster = _wait_for_cluster(run)
            job = TrainingJob.from_json(run.require_json(JOB))
            status, log_tail = _run_workers(run, cluster, _find_node(cluster, node_id), job)
        except HeterpsError as error:
            logger.error("%s", error)
            status, log_tail = error.exit_status, str(error)
    run.write_last_words(
        node_key(node_id, "exit.json"),
        {"exit_status": status, "ended_at_s": time.time(), "log_tail": log_tail},
    )
    return status


def torchrun_command(cluster: Cluster, node: Node) -> list[str]:
    """Return the command that starts the workers of a node."""
    num_nodes = len(cluster.nodes)
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={num_nodes}",
        f"--nproc-per-node={node.num_workers}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={cluster.rendezvous}",
        f"--rdzv-id={cluster.run_id}",
        "--rdzv-conf=join_timeout=300,last_call_timeout=1",
        f"--max-restarts={MAX_RESTARTS}",
        "--monitor-interval=0.2",
        f"--shutdown-timeout={SHUTDOWN_LIMIT_S}",
        *("-m", "heterps_core.training.worker"),
    ]


def worker_environment(cluster: Cluster, job: TrainingJob, dataset: str) -> dict[str, str]:
    """Return the environment of torchrun and its workers; `dataset` is where this node has the data set."""
    environment = dict(os.environ)
    environment[DATASET_VARIABLE] = dataset
    environment["OMP_NUM_THREADS"] = str(job.config.threads_per_worker)
    # With the shared store most killed runs never came back; measured in docs/LOG.md.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if cluster.rendezvous.startswith("127."):
        # Otherwise gloo binds to what the host name resolves to, which on a laptop may be nothing.
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


def _run_workers(run: RunDirectory, cluster: Cluster, node: Node, job: TrainingJob) -> tuple[int, str]:
    """Run torchrun to its end; returns its exit status and the end of its log."""
    log_key = node_key(node.node_id, "workers.log")
    with tempfile.TemporaryDirectory(prefix="heterps-node-") as folder:
        dataset = job.dataset
        if not run.is_local:
            dataset = f"{folder}/{DATA}"
            run.download_folder(DATA, Path(dataset))
        log_path = run.path(log_key) if run.is_local else Path(folder) / "workers.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                torchrun_command(cluster, node),
                env=worker_environment(cluster, job, dataset),
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


@contextmanager
def _heartbeat(run: RunDirectory, node_id: str) -> Iterator[None]:
    """Write a sign of life every two seconds."""
    ended = threading.Event()

    def beat() -> None:
        while True:
            try:
                run.write_json(
                    node_key(node_id, "heartbeat.json"), {"beat_at_s": time.time(), "pid": os.getpid()}
                )
            except OSError as error:
                # A full disk may have room again; what it costs the training is told by the workers.
                logger.warning("no sign of life could be written: %s", error)
            if ended.wait(HEARTBEAT_INTERVAL_S):
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _wait_for_cluster(run: RunDirectory) -> Cluster:
    deadline_s = time.monotonic() + CLUSTER_TIMEOUT_S
    while time.monotonic() < deadline_s:
        document = run.read_json(CLUSTER)
        if document is not None:
            return Cluster.from_json(document)
        time.sleep(CLUSTER_POLL_S)
    raise ConfigurationError(
        f"{CLUSTER} must appear in {run.location} within {CLUSTER_TIMEOUT_S:.0f} s of a node's start, but did not; "
        f"the flow that launched the node has probably ended"
    )


def _find_node(cluster: Cluster, node_id: str) -> Node:
    for node in cluster.nodes:
        if node.node_id == node_id:
            return node
    raise ConfigurationError(
        f"the node {node_id!r} must be one of the cluster's: {', '.join(node.node_id for node in cluster.nodes)}"
    )


if __name__ == "__main__":
    sys.exit(main())
