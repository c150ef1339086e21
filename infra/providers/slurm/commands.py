"""The commands of Slurm: their answers, and in one line why there is none."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Collection

from heterps_core.errors import ProvisioningError

COMMAND_LIMIT_S = 30.0
_OLDEST_VERSION = (20, 11)

_TOO_LARGE = (
    "no node of the partition has so many cores, cards or so much memory: correct the kind of machine by "
    "sinfo -o '%P %c %m %G'"
)
_WAYS_OUT = {
    "invalid partition": "name a partition that sinfo shows in the selector of this kind of machine",
    "Invalid feature": "name a feature that sinfo -o %f shows in the selector of this kind of machine",
    "Requested node configuration is not available": _TOO_LARGE,
    "Requested partition configuration not available": _TOO_LARGE,
    "Requested operation not supported": "several machines need heterogeneous jobs, which Slurm starts with "
    "SchedulerType=sched/backfill alone; ask its administrator, or plan one machine",
    "time limit": "set a lower max_usd_per_run, or name a partition with a higher limit (sinfo -o '%P %l')",
    "account": "ask the administrator for an account, or set SBATCH_ACCOUNT",
    "Unable to contact slurm controller": "check that slurmctld runs: scontrol ping",
    "configuration source": "start heterps on a login node of the cluster, or set SLURM_CONF",
    "authentication": "check that munge runs and that its key is that of the cluster",
}
"""What a user can do about an answer of Slurm's commands, by a part of it."""

ASK_SLURM = "ask the administrator of the cluster, or try again later"


def asked(*command: str, script: str | None = None) -> str:
    """Run a command of Slurm and return its answer, times in UTC.

    Raises:
        ProvisioningError: It is not installed, refuses, or does not answer.
    """
    # Variables such as SQUEUE_STATES would hide machines.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        done = subprocess.run(
            command,
            input=script or "",
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            env={**environment, "TZ": "UTC", "SLURM_TIME_FORMAT": "standard"},
            check=False,
        )
    except FileNotFoundError as problem:
        raise ProvisioningError(
            f"{command[0]} of Slurm must be installed here, and is not; start heterps on a login node, "
            f"or install slurm-client"
        ) from problem
    except subprocess.TimeoutExpired as problem:
        raise ProvisioningError(
            f"{command[0]} must answer within {COMMAND_LIMIT_S:.0f} s, and did not; check that slurmctld runs: "
            f"scontrol ping"
        ) from problem
    if done.returncode:
        said = " ".join(line.partition("error: ")[2] or line for line in done.stderr.splitlines())
        way_out = next((fix for part, fix in _WAYS_OUT.items() if part.lower() in said.lower()), ASK_SLURM)
        raise ProvisioningError(f"{command[0]} of Slurm failed: {said}; {way_out}")
    return done.stdout


def check_version() -> str:
    """Return the version of Slurm.

    Raises:
        ProvisioningError: It is too old, or there is none.
    """
    answer = asked("sinfo", "--version").strip()
    found = re.search(r"(\d+)\.(\d+)", answer)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST_VERSION:
        raise ProvisioningError(
            f"Slurm must be of version {'.'.join(map(str, _OLDEST_VERSION))} or later, got {answer!r}; "
            f"use a newer cluster"
        )
    return answer


def check_scheduler() -> None:
    """Check that jobs of several components can start.

    Raises:
        ProvisioningError: Not so.
    """
    found = re.search(r"^SchedulerType\s*=\s*(\S+)", asked("scontrol", "show", "config"), re.MULTILINE)
    if found is None or found[1] != "sched/backfill":
        raise ProvisioningError(
            f"heterogeneous jobs need SchedulerType=sched/backfill, got {found and found[1]}; "
            f"ask its administrator, or plan one machine"
        )


def addresses_of(hosts: Collection[str]) -> dict[str, str]:
    """Return the IPv4 addresses of nodes, by their names in Slurm.

    Raises:
        ProvisioningError: Slurm does not answer, or a name has none.
    """
    answer = asked("sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%N|%o")
    named = dict(line.strip().split("|", 1) for line in answer.splitlines())
    try:
        return {host: socket.gethostbyname(named[host]) for host in hosts}
    except (KeyError, OSError) as problem:
        raise ProvisioningError(
            f"each of {', '.join(hosts)} must have an address that is known here, but {problem}; "
            f"check NodeAddr in scontrol show node"
        ) from problem
