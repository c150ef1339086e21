"""The queue of Slurm: components of jobs as `squeue` shows them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self

from heterps_core.errors import ProvisioningError
from infra.ledger.ledger_entry import Instance, moment_or_none
from infra.providers.slurm.commands import asked

_COMMENT = "|#"
_HEADER = f"JOBID|STATE|START_TIME|END_TIME|NODELIST|REASON|NAME{_COMMENT}COMMENT"
_FORMAT = f"%i|%T|%S|%e|%N|%r|%j{_COMMENT}%k"
PENDING, RUNNING = "PENDING", "RUNNING"
_OVER = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
}
_OVER |= {"REVOKED", "TIMEOUT"}
"""States of jobs that have ended; any other one counts as alive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A component of a job of this program, as `squeue` shows it."""

    number: str
    """Of the component, for instance 12+1; of the job where it has one component."""

    node_id: str
    state: str
    host: str
    because: str
    """State and reason in Slurm's words."""

    machine: Instance

    @classmethod
    def read(cls, line: str) -> Self:
        """Return the component of a line of this program's."""
        facts, _, comment = line.partition(_COMMENT)
        number, state, started, ended, host, reason, name = facts.split("|")
        run_id, lease = [*comment.split(" ")[1:], ""][:2]
        node_id, _, instance_type = name.partition("@")
        because = state if reason in ("", "None") else f"{state} ({reason})"
        is_ended = state in _OVER
        return cls(
            number=number,
            node_id=node_id,
            state=state,
            host=host,
            because=because,
            machine=Instance(
                # With the run, as a cluster that was set up again counts from 1.
                provider_instance_id=f"{run_id}/{number}",
                run_id=run_id,
                node_id=node_id,
                instance_type=instance_type,
                # One that waits holds no machine yet: Slurm says when it may start.
                launched_at=(None if state == PENDING else _moment(started)) or datetime.now(UTC),
                is_ended=is_ended,
                ended_at=_end_of_second(ended) if is_ended else None,
                lease_until=moment_or_none(lease),
                ended_because=because if is_ended else "",
                is_preempted=state == "PREEMPTED",
            ),
        )

    @property
    def instance_id(self) -> str:
        """The id of its machine."""
        return self.machine.provider_instance_id

    @property
    def job_id(self) -> str:
        """The number of the whole job."""
        return self.number.partition("+")[0]


def jobs_of(mark: str, run_id: str | None = None, *, with_ended: bool = False) -> list[Job]:
    """Return the components of runs.

    Raises:
        ProvisioningError: Slurm does not answer.
    """
    states = ("--states=all",) if with_ended else ()
    answer = asked("squeue", "--all", f"--user={os.geteuid()}", f"--format={_FORMAT}", *states)
    header, *lines = answer.splitlines() or [""]
    if header != _HEADER:
        raise ProvisioningError(
            f"squeue must answer with its header, but said {header[:80]!r}: which machines there are is unknown; "
            f"check that slurmctld runs: scontrol ping"
        )
    jobs = [Job.read(line) for line in lines if line.partition(_COMMENT)[2].startswith(f"{mark} ")]
    of_run = [job for job in jobs if run_id in (None, job.machine.run_id)]
    return [job for job in of_run if with_ended or not job.machine.is_ended]


def _moment(text: str) -> datetime | None:
    """Read a time of Slurm, which is in UTC; None where it is none, such as N/A."""
    return moment_or_none(f"{text}+00:00")


def _end_of_second(text: str) -> datetime | None:
    """Return the end of a second: Slurm rounds times down, and a machine is charged until it was gone."""
    moment = _moment(text)
    return None if moment is None else moment + timedelta(seconds=1)
