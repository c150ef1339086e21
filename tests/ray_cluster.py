"""A Ray cluster of its own on this machine: a head and raylets with resources of their own, in a network namespace.

Ray listens on all interfaces, so it never runs outside of a namespace, and a test that asks it enters that for the
time. Everything that runs there ends with it. Needs root.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import psutil
import pytest

from tests.waiting import wait_for

ADDRESS = "127.0.0.1:6379"
NODES = ("epyc", "xeon", "arm")
CORES_EACH, MEMORY_BYTES_EACH = 8, 16 * 2**30
CLONE_NEWNET = 0x40000000

PROGRAM = f"""
import contextlib, json, os, sys, threading, time
import psutil
from ray.cluster_utils import Cluster

def reap():
    # Actors take a raylet for alive that is a zombie.
    while True:
        time.sleep(0.2)
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error, ChildProcessError):
                if child.status() == "zombie":
                    os.waitpid(child.pid, os.WNOHANG)

threading.Thread(target=reap, daemon=True).start()

common = {{"object_store_memory": 80_000_000, "node_ip_address": "127.0.0.1"}}
head = {{"gcs_server_port": 6379, "num_cpus": 0, "include_dashboard": False}}
cluster = Cluster(initialize_head=True, head_node_args=common | head)
for resource in json.loads(sys.argv[1]):
    sizes = {{"num_cpus": {CORES_EACH}, "memory": {MEMORY_BYTES_EACH}, "resources": {{resource: 1}}}}
    cluster.add_node(**common, **sizes)
print("complete", flush=True)
for line in sys.stdin:
    cluster.add_node(**common, **(sizes | {{"resources": {{line.strip(): 1}}}}))
    print("added", flush=True)
"""
"""Keeps a cluster; each line of its input adds a machine with such a resource."""


def why_no_ray() -> str | None:
    """Return why a cluster cannot be made here, None where it can."""
    if os.geteuid() != 0:
        return "a Ray cluster needs root"
    if importlib.util.find_spec("ray") is None:
        return "a Ray cluster needs the package ray"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        return "network namespaces are not permitted here"
    return None


class RayCluster:
    """The cluster; use it as a context."""

    def __init__(self, nodes: Sequence[str] = NODES) -> None:
        # Short, as the name of a socket has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        network = "ip link set lo up && ip addr add 10.0.0.1/24 dev lo && exec sleep infinity"
        self.keeper = subprocess.Popen(["unshare", "--net", "sh", "-c", network])
        self.namespace = Path(f"/proc/{self.keeper.pid}/ns/net")
        self.resources = nodes
        self.environment = {
            "RAY_ADDRESS": ADDRESS,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_raylet_start_wait_time_s": "600",
            "RAY_TMPDIR": str(self.folder),
        }

    def __enter__(self) -> Self:
        own = Path("/proc/self/ns/net").readlink()
        wait_for(lambda: own != self.namespace.readlink(), what="the namespace")
        command = [sys.executable, "-c", PROGRAM, json.dumps(self.resources)]
        with (self.folder / "cluster.log").open("wb") as log:
            self.cluster = subprocess.Popen(
                ["nsenter", f"--net={self.namespace}", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self.environment, "RAY_ADDRESS": ""},
                text=True,
            )
        try:
            self._hear("complete")
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def add_node(self, resource: str) -> None:
        """Start the raylet of a further machine."""
        assert self.cluster.stdin is not None
        self.cluster.stdin.write(f"{resource}\n")
        self.cluster.stdin.flush()
        self._hear("added")

    def raylets(self, resource: str) -> list[psutil.Process]:
        """Return the raylets of machines with a resource."""
        return [
            each
            for each in self.inside()
            if each.name() == "raylet" and f"{resource},1" in " ".join(each.cmdline())
        ]

    def drain(self, resource: str) -> None:
        """Let Ray drain a machine, as an autoscaler does before a preemption; this process must be connected."""
        import ray

        node_id = next(
            node["NodeID"] for node in ray.nodes() if resource in node["Resources"] and node["Alive"]
        )
        reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test")
        command = ["drain-node", "--address", ADDRESS, "--node-id", node_id, *reason]
        limit = ("--deadline-remaining-seconds", "300")
        subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *command, *limit], check=True)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let this thread, and those that it starts, be in the namespace while the block runs."""
        with Path("/proc/thread-self/ns/net").open() as own, self.namespace.open() as namespace:
            self._enter(namespace.fileno())
            try:
                yield
            finally:
                self._enter(own.fileno())

    @staticmethod
    def _enter(descriptor: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")

    def inside(self) -> list[psutil.Process]:
        """Return the processes in the namespace beside its keeper and this one."""
        found = []
        wanted, own = self.namespace.readlink(), (self.keeper.pid, os.getpid())
        for process in psutil.process_iter():
            with suppress(OSError, psutil.NoSuchProcess):
                if process.pid not in own and Path(f"/proc/{process.pid}/ns/net").readlink() == wanted:
                    found.append(process)
        return found

    def end(self) -> None:
        """End everything in the namespace and forget the folder; this process lets go of it first."""
        if "ray" in sys.modules:
            import ray

            ray.shutdown()
        wait_for(self._is_empty, what="the end of the cluster")
        self.cluster.communicate()
        self.keeper.kill()
        self.keeper.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _is_empty(self) -> bool:
        processes = self.inside()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.cluster.poll()
        return not processes

    def _hear(self, word: str) -> None:
        assert self.cluster.stdout is not None
        for line in self.cluster.stdout:
            if line.strip() == word:
                return
        raise AssertionError((self.folder / "cluster.log").read_text()[-2000:])


def ray_cluster() -> RayCluster:
    """Return a cluster; the test that asks is skipped where none can be made."""
    if reason := why_no_ray():
        pytest.skip(reason)
    return RayCluster()
