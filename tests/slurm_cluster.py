"""A Slurm cluster of its own on this machine: real daemons from Debian's packages, in a network namespace.

munged, slurmctld and a slurmd for each node have loopback addresses, keys and folders of their own. The namespace
keeps their ports apart from those of this machine, and everything that runs in it ends with it. Needs root.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from tests.waiting import wait_for

COMMANDS = ("sbatch", "squeue", "scancel", "sinfo", "scontrol", "srun")
NODES = ("epyc1", "epyc2", "xeon1", "xeon2", "arm1")
CORES_EACH, MEMORY_MIB_EACH = 8, 16_384

CONFIGURATION = """
ClusterName=heterps
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/{scheduler}
SchedulerParameters=bf_interval=1,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
KillWait=2
MessageTimeout=5
SlurmdTimeout=10
ReturnToService=2
"""


def why_no_slurm() -> str | None:
    """Return why a cluster cannot be made here, None where it can."""
    if os.geteuid() != 0:
        return "a Slurm cluster needs root"
    needed = ("slurmctld", "slurmd", "munged", "unshare", "nsenter", "ip")
    missing = [each for each in needed if shutil.which(each) is None]
    if missing:
        return f"a Slurm cluster needs slurm-wlm, munge and iproute2; missing: {', '.join(missing)}"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        return "network namespaces are not permitted here"
    return None


class SlurmCluster:
    """The cluster; use it as a context. Its commands are found by `environment`."""

    def __init__(self, *, scheduler: str = "backfill", nodes: Sequence[str] = NODES) -> None:
        # Short, as the name of a socket has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.nodes = nodes
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        commands = self.folder / "bin"
        self.environment = {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        # Names are looked up for a family of addresses of which the namespace has more than loopback ones.
        network = "ip link set lo up && ip addr add 10.0.0.1/24 dev lo && exec sleep infinity"
        self.keeper = subprocess.Popen(["unshare", "--net", "sh", "-c", network])
        self._namespace = Path(f"/proc/{self.keeper.pid}/ns/net")
        commands.mkdir()
        for name in COMMANDS:
            wrapper = commands / name
            wrapper.write_text(f'#!/bin/sh\nexec nsenter --net={self._namespace} {shutil.which(name)} "$@"\n')
            wrapper.chmod(0o755)
        lines = [CONFIGURATION.format(folder=self.folder, scheduler=scheduler)]
        for number, name in enumerate(nodes):
            lines.append(
                f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.{11 + number} Port={7011 + number} "
                f"CPUs={CORES_EACH} RealMemory={MEMORY_MIB_EACH} Feature={name[:-1]} State=UNKNOWN"
            )
        lines.append(f"PartitionName=cpu Nodes={','.join(nodes)} Default=YES MaxTime=INFINITE State=UP")
        (self.folder / "slurm.conf").write_text("\n".join([*lines, ""]))
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        (self.folder / "munge.key").chmod(0o400)

    def __enter__(self) -> Self:
        own = Path("/proc/self/ns/net").readlink()
        wait_for(lambda: own != self._namespace.readlink(), what="the namespace")
        try:
            names = ("socket", "key-file", "pid-file", "log-file", "seed-file")
            files = ("munge.socket", "munge.key", "munge.pid", "munge.log", "munge.seed")
            options = [f"--{name}={self.folder}/{file}" for name, file in zip(names, files, strict=True)]
            self.start("munged", "--foreground", "--force", *options)
            wait_for((self.folder / "munge.socket").exists, what="munged")
            self.start_controller()
            for name in self.nodes:
                self.start_node(name)
            wait_for(self._is_idle, what="idle nodes", poll_s=0.2)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, *command: str, name: str = "") -> None:
        """Start a daemon in the namespace."""
        key = name or command[0]
        with (self.folder / f"{key}.out").open("ab") as said:
            self.daemons[key] = subprocess.Popen(
                ["nsenter", f"--net={self._namespace}", *command],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**os.environ, "SLURM_CONF": self.environment["SLURM_CONF"]},
            )

    def start_controller(self) -> None:
        """Start slurmctld, with the state that an earlier one left."""
        self.start("slurmctld", "-D")

    def wait_for_saved_state(self) -> None:
        """Wait until slurmctld has written what it knows now; it writes every few seconds."""
        state, now = self.folder / "state" / "job_state", time.time()
        wait_for(lambda: state.exists() and state.stat().st_mtime > now, what="saved state")

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        self.start("slurmd", "-D", "-N", name, name=name)

    def kill(self, name: str) -> None:
        """Kill a daemon at once: a node by its name, or slurmctld."""
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def asked(self, *command: str) -> str:
        """Run a command of Slurm that must succeed; return its answer."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def queue(self) -> list[str]:
        """Return the components that wait or run."""
        return self.asked("squeue", "-h", "-o", "%i").split()

    def end(self) -> None:
        """End everything in the namespace and forget the folder."""
        inside = self._namespace.readlink()
        for process in psutil.process_iter():
            with suppress(OSError, psutil.NoSuchProcess):
                if (
                    Path(f"/proc/{process.pid}/ns/net").readlink() == inside
                    and process.pid != self.keeper.pid
                ):
                    process.kill()
        for daemon in self.daemons.values():
            daemon.wait()
        self.keeper.kill()
        self.keeper.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _is_idle(self) -> bool:
        with suppress(AssertionError):
            return self.asked("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(self.nodes)
        return False


def slurm_cluster(**settings: Any) -> SlurmCluster:
    """Return a cluster; the test that asks is skipped where none can be made."""
    if reason := why_no_slurm():
        pytest.skip(reason)
    return SlurmCluster(**settings)
