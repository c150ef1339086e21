"""Hosts with addresses of their own on this machine: network namespaces on a bridge, each with a limited link.

Needs root, iproute2 and util-linux, and to run inside a fresh namespace (`unshare --net`), in which the bridge lies.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from heterps_core.units import BYTES_PER_S_PER_MBIT_PER_S
from tests.waiting import wait_for

BRIDGE = "cloud"
BRIDGE_MAC = "02:00:00:00:00:01"
INTERFACE = "eth0"
PREFIX_BITS = 16
MTU_BYTES = 9001
"""Of a VPC. Frames of 1,500 bytes would spend 4 % of a link on headers instead of 0.7 %."""

BURST_BYTES = 2 * MTU_BYTES
"""What a link passes at once after a pause; with more, short messages would find no limit."""

QUEUE = "2s"
"""Of waiting, before a link drops anything: TCP waits 200 ms for each loss, and shapers of a cloud queue."""

QUEUED_BYTES = 2 * MTU_BYTES
"""Of one connection in its host's queue, where short messages wait behind them."""

LIFETIME_S = 900


def why_no_hosts() -> str | None:
    """Return why hosts cannot be made here, None where they can."""
    if os.geteuid() != 0:
        return "hosts with addresses of their own need root"
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return (
            f"hosts with addresses of their own need iproute2 and util-linux; missing: {', '.join(missing)}"
        )
    bridge = ["unshare", "--net", "ip", "link", "add", BRIDGE, "type", "bridge"]
    if subprocess.run(bridge, capture_output=True, check=False).returncode:
        return "namespaces with bridges are not permitted here"
    return None


def run(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True)


def make_bridge(address: str) -> None:
    """Make the bridge that all hosts hang on; this namespace has `address` on it."""
    run("ip", "link", "set", "lo", "up")
    # A bridge without an address of its own takes that of a host, and is out of reach for a while when that one goes.
    run("ip", "link", "add", BRIDGE, "address", BRIDGE_MAC, "type", "bridge")
    run("ip", "addr", "add", f"{address}/{PREFIX_BITS}", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")


class NetworkHost:
    """A namespace that lives as long as its keeper, linked to the bridge at the same rate in both directions.

    Without a rate, None, the link has no limit.
    """

    def __init__(self, number: int, address: str, *, mbit_per_s: float | None) -> None:
        self.address = address
        self.bytes_per_s = math.inf if mbit_per_s is None else mbit_per_s * BYTES_PER_S_PER_MBIT_PER_S
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.keeper = subprocess.Popen(["unshare", "--net", "sleep", str(LIFETIME_S)], **silent)
        self.namespace = Path(f"/proc/{self.keeper.pid}/ns/net")
        try:
            own = Path("/proc/self/ns/net").readlink()
            wait_for(lambda: own != self.namespace.readlink(), what="the namespace")
            self._link(f"host{number}", mbit_per_s)
        except BaseException:
            self.keeper.kill()
            raise

    def _link(self, outer: str, mbit_per_s: float | None) -> None:
        peer = ("peer", "name", INTERFACE, "netns", str(self.keeper.pid), "mtu", str(MTU_BYTES))
        run("ip", "link", "add", outer, "mtu", str(MTU_BYTES), "type", "veth", *peer)
        run("ip", "link", "set", outer, "master", BRIDGE, "up")
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "addr", "add", f"{self.address}/{PREFIX_BITS}", "dev", INTERFACE)
        self.run("ip", "link", "set", INTERFACE, "up")
        if mbit_per_s is None:
            return
        limit = ("tbf", "rate", f"{mbit_per_s:.3f}mbit", "burst", str(BURST_BYTES), "latency", QUEUE)
        self.run("sh", "-c", f"echo {QUEUED_BYTES} > /proc/sys/net/ipv4/tcp_limit_output_bytes")
        self.run("ip", "link", "set", INTERFACE, "gso_max_size", str(QUEUED_BYTES))
        self.run("tc", "qdisc", "add", "dev", INTERFACE, "root", *limit)
        run("tc", "qdisc", "add", "dev", outer, "root", *limit)

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs another one on this host."""
        return ["nsenter", f"--net={self.namespace}", *command]

    def run(self, *command: str) -> None:
        """Run a command on this host that must succeed."""
        run(*self.inside(*command))

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a command on this host."""
        return subprocess.Popen(self.inside(*command), **options)

    def end(self) -> None:
        """Let the namespace go."""
        self.keeper.kill()
        self.keeper.wait()
