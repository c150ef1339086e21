"""Slurm as a provider: a launch is one job, and each of its machines a component of that job.

A heterogeneous job starts all its components or none, and one component can be cancelled alone. The script of the job
runs on the first component, whose end ends the others. The comment of a job carries run and lease, the name of a
component its node and kind, so that any process finds them by `squeue`. An answer of `squeue` without its header is
no answer: machines are then unknown, never gone.

Slurm lets users lower a time limit and never raise it, so `--time` is a node's lifetime and a minute. Before that the
node ends itself where its lease is not renewed (bootstrap.sh), and the sweeper cancels the job.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import ClassVar, Self

from heterps_core.errors import ConfigurationError, ProvisioningError
from heterps_core.plans.provisioning_plan import NodeRequest
from heterps_core.training.node import NODE_ID_VARIABLE, NOTICE_S
from infra.bootstrap.node_start import BOOTSTRAP_SCRIPT
from infra.checks import Check, tried
from infra.inventory import MachineKind, kind_name
from infra.ledger.ledger_entry import Instance
from infra.providers.base import InsufficientCapacityError, Launch
from infra.providers.launching import (
    ProcessProvider,
    Started,
    prepared_console,
    run_directory_check,
    workspace_mark,
)
from infra.providers.slurm.commands import ASK_SLURM, addresses_of, asked, check_scheduler, check_version
from infra.providers.slurm.queue import PENDING, RUNNING, Job, jobs_of
from infra.workspace import Workspace

logger = logging.getLogger(__name__)

WAIT_VARIABLE = "HETERPS_SLURM_WAIT_MINUTES"
"""Longest wait in the queue; by default `DEFAULT_WAIT_MINUTES`."""

DEFAULT_WAIT_MINUTES = 30.0
_END_LIMIT_S = 90.0
"""Slurm kills processes that stay after KillWait, 30 s by default."""

_POLL_INTERVAL_S = 0.5
_MIB = 2**20
_SELECTORS = {"partition": "--partition", "features": "--constraint", "gres": "--gres"}


class SlurmProvider(ProcessProvider):
    """Runs each node on a machine of a Slurm cluster, as one component of the job of its launch.

    Args:
        workspace: Its inventory names partition and features of each kind; others go to the default partition.
        wait_s: Longest wait in the queue.
    """

    name: ClassVar[str] = "slurm"
    has_inventory: ClassVar[bool] = True
    machines_text: ClassVar[str] = "machines of Slurm"
    lease_s: ClassVar[float] = 120.0

    def __init__(self, workspace: Workspace, *, wait_s: float = 60 * DEFAULT_WAIT_MINUTES) -> None:
        super().__init__()
        self._workspace = workspace
        self._wait_s = wait_s
        self._mark = f"heterps-{workspace_mark(workspace)}"

    @classmethod
    def for_workspace(cls, workspace: Workspace, *, region: str) -> Self:
        """Make the provider; see `Provider.for_workspace`."""
        minutes = os.environ.get(WAIT_VARIABLE) or DEFAULT_WAIT_MINUTES
        try:
            wait_s = 60 * float(minutes)
        except ValueError as problem:
            raise ProvisioningError(
                f"{WAIT_VARIABLE} must be a number of minutes, got {minutes!r}; unset it for {DEFAULT_WAIT_MINUTES:g}"
            ) from problem
        return cls(workspace, wait_s=wait_s)

    @classmethod
    def found_machines(cls, workspace: Workspace) -> tuple[MachineKind, ...]:
        """Return the nodes of a partition that are alike as a kind, each node once; see `Provider.found_machines`."""
        check_version()
        answer = asked("sinfo", "--noheader", "--Node", "--format=%N|%R|%c|%m|%d|%G|%f")
        sizes = {
            name: size for name, _, size in (line.partition("|") for line in reversed(answer.splitlines()))
        }
        counts = Counter(sorted(sizes.values()))
        return tuple(_kind_of(size, number, count) for number, (size, count) in enumerate(counts.items(), 1))

    @staticmethod
    def is_set_up() -> bool:
        """Tell whether Slurm is installed here and knows a cluster; see `Provider.is_set_up`."""
        with suppress(ProvisioningError):
            return bool(check_version())
        return False

    def checks(self) -> Iterator[Check]:
        """Check version, controller, scheduler and run directory; see `Provider.checks`."""
        yield tried("Slurm version", check_version)
        yield tried(
            "Slurm controller", lambda: f"{len(jobs_of(self._mark))} machines of heterps in its queue"
        )
        yield tried("Slurm machines", lambda: ", ".join(asked("sinfo", "-h", "-o", "%D of %P").splitlines()))
        yield tried("Slurm components", check_scheduler, found="several machines can start together")
        yield run_directory_check(self._workspace)

    def start(self, requests: Sequence[NodeRequest], launch: Launch) -> Iterator[Started]:
        """Submit one job and wait until it runs; see `ProcessProvider.start`."""
        check_version()
        return self._start(requests, self._selected(requests), launch)

    def _start(
        self, requests: Sequence[NodeRequest], selected: Sequence[Sequence[str]], launch: Launch
    ) -> Iterator[Started]:
        if not jobs_of(self._mark, launch.run_id):
            self._submit(requests, selected, launch)
        jobs = self._wait_for_start(launch.run_id, requests)
        addresses = addresses_of([job.host for job in jobs.values()])
        for job in (jobs[request.node_id] for request in requests):
            yield Started(addresses[job.host], job.instance_id, job.machine.launched_at)

    def living_nodes(self, run_id: str) -> set[str]:
        """Return the nodes with a running component; see `ProcessProvider.living_nodes`."""
        return {job.node_id for job in jobs_of(self._mark, run_id) if job.state == RUNNING}

    def renew_lease(self, run_id: str, *, until: datetime) -> None:
        """Write the lease into the comment of the run's job; see `Provider.renew_lease`."""
        for job_id in sorted({job.job_id for job in jobs_of(self._mark, run_id)}):
            asked("scontrol", "update", f"JobId={job_id}", f"Comment={self._comment(run_id, until)}")

    def terminate_instances(self, instances: Sequence[Instance]) -> None:
        """Cancel components, or their whole job while that is pending, and wait until `squeue` shows none of them.

        See `Provider.terminate_instances`.
        """
        ids = {instance.provider_instance_id for instance in instances}
        all_jobs = jobs_of(self._mark)
        jobs = [job for job in all_jobs if job.instance_id in ids]
        if not jobs:
            return
        of_run = {job.instance_id for job in all_jobs if job.machine.run_id == jobs[0].machine.run_id}
        whole = of_run <= ids or any(job.state == PENDING for job in jobs)
        asked("scancel", "--quiet", *sorted({job.job_id if whole else job.number for job in jobs}))
        deadline_s = time.monotonic() + _END_LIMIT_S
        while left := ids & {job.instance_id for job in jobs_of(self._mark)}:
            if time.monotonic() > deadline_s:
                raise ProvisioningError(
                    f"{', '.join(sorted(left))} must end when they are cancelled, and did not within "
                    f"{_END_LIMIT_S:.0f} s; look at them with squeue, the next sweep will try again"
                )
            time.sleep(_POLL_INTERVAL_S)

    def list_instances(self, run_id: str | None = None) -> tuple[Instance, ...]:
        """Return all components that `squeue` shows; see `Provider.list_instances`."""
        return tuple(job.machine for job in jobs_of(self._mark, run_id))

    def remembered_instances(self, provider_instance_ids: Collection[str]) -> tuple[Instance, ...]:
        """Return ended ones too, for as long as slurmctld keeps them (MinJobAge, 300 s by default)."""
        return tuple(job.machine for job in jobs_of(self._mark, with_ended=True))

    def _comment(self, run_id: str, lease_until: datetime) -> str:
        return f"{self._mark} {run_id} {lease_until.isoformat()}"

    def _selected(self, requests: Sequence[NodeRequest]) -> list[list[str]]:
        """Return the options that name the machines of each request.

        Raises:
            ConfigurationError: The inventory cannot be used, or has a selector that this home does not know.
        """
        selectors = {kind.kind: kind.selector for kind in self.kinds(self._workspace)}
        chosen = [selectors.get(request.offer.instance_type.family, {}) for request in requests]
        if unknown := {name for selector in chosen for name in selector} - _SELECTORS.keys():
            raise ConfigurationError(
                f"a selector of Slurm may name {', '.join(_SELECTORS)}, got {min(unknown)}; correct machines.toml"
            )
        return [[f"{_SELECTORS[name]}={value}" for name, value in each.items()] for each in chosen]

    def _submit(
        self, requests: Sequence[NodeRequest], selected: Sequence[Sequence[str]], launch: Launch
    ) -> None:
        """Submit the job of a launch."""
        minutes = math.ceil(launch.bootstrap.lifetime_s / 60) + 1
        shared = (
            f"--comment={self._comment(launch.run_id, launch.lease_until)}",
            f"--time={minutes}",
            # A job that still waits then is removed, whether a flow lives or not.
            f"--deadline=now+{math.ceil(self._wait_s) + 60 * minutes + 60}",
            f"--signal=USR1@{NOTICE_S}",
            "--no-requeue",
            "--output=/dev/null",
        )
        components: list[str] = []
        for request, selector in zip(requests, selected, strict=True):
            components += [":", f"--job-name={_name_of(request)}", *shared, *_resources(request), *selector]
        asked("sbatch", "--parsable", *components[1:], script=self._script(requests, launch))

    def _script(self, requests: Sequence[NodeRequest], launch: Launch) -> str:
        """Return the script of a job: it starts the node of each component and waits for their ends."""
        bootstrap = launch.bootstrap
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.variables(launch).items()]
        starts = []
        for index, request in enumerate(requests):
            console = prepared_console(bootstrap.run_location, request.node_id)
            component = [f"--het-group={index}"] if len(requests) > 1 else []
            command = ["srun", *component, *_resources(request), f"--output={console}"]
            starts.append(
                f'{NODE_ID_VARIABLE}={request.node_id} {shlex.join(command)} bash -c "$node" "$@" &'
            )
        node = f"node={shlex.quote(BOOTSTRAP_SCRIPT.read_text())}"
        arguments = f"set -- bootstrap {shlex.join(bootstrap.arguments)}"
        return "\n".join(["#!/usr/bin/env bash", *exports, node, arguments, *starts, "wait\n"])

    def _wait_for_start(self, run_id: str, requests: Sequence[NodeRequest]) -> dict[str, Job]:
        """Return the components of a launch by their nodes once all run.

        Raises:
            InsufficientCapacityError: They do not run within the longest wait.
            ProvisioningError: One ended.
        """
        began_s = time.monotonic()
        state = "unknown"
        while True:
            try:
                jobs = jobs_of(self._mark, run_id, with_ended=True)
            except ProvisioningError as problem:
                # A controller that is away comes back, and the job with it.
                state = str(problem)
            else:
                if ends := [f"{job.number} {job.because}" for job in jobs if job.machine.is_ended]:
                    raise ProvisioningError(
                        f"the job of run {run_id} ended before it ran: {', '.join(ends)}; {ASK_SLURM}"
                    )
                if len(jobs) != len(requests):
                    raise ProvisioningError(
                        f"slurmctld must know the job of run {run_id}, but has forgotten it, as after a restart "
                        f"without its state; restart it with its state, or end what still runs: scancel "
                        f"--name={_name_of(requests[0])}"
                    )
                if all(job.state == RUNNING for job in jobs):
                    return {job.node_id: job for job in jobs}
                state = next(job.because for job in jobs if job.state != RUNNING)
            if time.monotonic() - began_s > self._wait_s:
                raise InsufficientCapacityError(
                    f"Slurm did not start the {len(requests)} machines of run {run_id} within "
                    f"{self._wait_s / 60:.3g} minutes ({state}); raise {WAIT_VARIABLE}, or plan with other machines"
                )
            time.sleep(_POLL_INTERVAL_S)


def _kind_of(size: str, number: int, count: int) -> MachineKind:
    """Return nodes as a kind; `size` is a line of `sinfo`."""
    partition, cores, memory_mib, disk_mib, cards, features = size.split("|")
    gpus = re.search(r"gpu:(?:([^:(,]+):)?(\d+)", cards)
    feature = {} if features == "(null)" else {"features": features.replace(",", "&")}
    return MachineKind(
        kind=kind_name(SlurmProvider.name, partition, cores, number),
        home=SlurmProvider.name,
        count=count,
        cores=int(cores),
        # Rounded down: a machine is asked for whole.
        memory_gb=math.floor(int(memory_mib) * _MIB / 1e8) / 10,
        cards=int(gpus[2]) if gpus else 0,
        card=(gpus[1] or "") if gpus else "",
        disk_gb=int(disk_mib) * _MIB // 10**9,
        price_usd_per_hour=0.0,
        selector={"partition": partition, **feature},
    )


def _name_of(request: NodeRequest) -> str:
    """Return the name of a component, which `Job.read` takes apart."""
    return f"{request.node_id}@{request.offer.instance_type.name}"


def _resources(request: NodeRequest) -> list[str]:
    """Return the options that ask for one machine of a request."""
    machine = request.offer.instance_type
    cards = [f"--gres=gpu:{machine.accelerator_count}"] if machine.accelerator_count else []
    memory = f"--mem={machine.memory_bytes // _MIB}M"
    return ["--nodes=1", "--ntasks=1", f"--cpus-per-task={machine.vcpus}", memory, *cards]
