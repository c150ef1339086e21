"""Machines that are processes of this one: the whole line on a laptop, with the same steps as on a cloud.

An instance exists, as on a cloud, until it is ended, also after its process has finished.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Self

from heterps_core.cluster import Cluster
from heterps_core.errors import ConfigurationError, ProvisioningError
from heterps_core.plans.provisioning_plan import NodeRequest, ProvisioningPlan
from infra.bootstrap.node_start import BOOTSTRAP_SCRIPT, node_environment
from infra.ledger.ledger_entry import Instance, moment_or_none
from infra.providers.base import Launch, Provider
from infra.providers.launching import Started, launched_together
from infra.providers.local_processes import LeaseFile, NodeKey, NodeProcesses, ProcessIdentity
from infra.workspace import LOOPBACK, Workspace, free_loopback_port

POLL_INTERVAL_S = 0.02

_CONSOLE_TAIL_CHARACTERS = 2_000
LEASE_SUFFIX = ".lease.json"
_BOOTED = "booted"
"""Mark that the bootstrap script makes in the node's folder of the run directory."""

_CONSOLE = "console.log"


class LocalProvider(Provider):
    """Runs each node as a session of processes on this machine."""

    name: ClassVar[str] = "local"
    is_dry_run: ClassVar[bool] = True
    machines_text: ClassVar[str] = "dry run here"
    runs_here: ClassVar[bool] = True

    def __init__(self, state_directory: Path) -> None:
        self.state_directory = state_directory.resolve()
        self._processes = NodeProcesses(self.state_directory)

    @classmethod
    def for_workspace(cls, workspace: Workspace, *, region: str) -> Self:
        """Make the provider of the leases of a workspace; see `Provider.for_workspace`."""
        return cls(workspace.leases_directory)

    def launched(self, plan: ProvisioningPlan, launch: Launch) -> Cluster:
        """Start every node; see `Provider.launch`."""
        run_id, location = launch.run_id, launch.bootstrap.run_location
        if "://" in location:
            raise ConfigurationError(f"the run directory of local nodes must be a local path, got {location}")
        known = next(filter(None, map(LeaseFile.read, self._lease_paths(run_id))), None)
        rendezvous = known.rendezvous if known else f"{LOOPBACK}:{free_loopback_port()}"

        def start(requests: Sequence[NodeRequest]) -> Iterator[Started]:
            for request in requests:
                lease = self._start(request, launch, rendezvous=rendezvous)
                launched_at = datetime.fromisoformat(lease.launched_at)
                yield Started(LOOPBACK, _instance_id(run_id, request.node_id), launched_at)

        return launched_together(self, plan, launch, start=start, rendezvous=lambda nodes: rendezvous)

    def wait_until_ready(self, cluster: Cluster, *, timeout_s: float) -> None:
        """Return once each node's bootstrap is through; see `Provider.wait_until_ready`."""
        deadline_s = time.monotonic() + timeout_s
        for node in cluster.nodes:
            lease = LeaseFile.read(self._lease_path(cluster.run_id, node.node_id))
            if lease is None or lease.leader is None:
                raise ProvisioningError(f"node {node.node_id} of run {cluster.run_id} has been ended")
            folder = _node_folder(lease.run_directory, node.node_id)
            while not (folder / _BOOTED).exists():
                is_alive = lease.leader.is_alive()
                if not is_alive or time.monotonic() > deadline_s:
                    trouble = f"is not up after {timeout_s:.0f} s" if is_alive else "ended before it was up"
                    raise ProvisioningError(
                        f"node {node.node_id} of run {cluster.run_id} {trouble}; "
                        f"its console says:\n{_console_tail(folder)}"
                    )
                time.sleep(POLL_INTERVAL_S)

    def renew_lease(self, run_id: str, *, until: datetime) -> None:
        """Move the leases of a run; see `Provider.renew_lease`."""
        for path in self._lease_paths(run_id):
            lease = LeaseFile.read(path)
            if lease is not None:
                replace(lease, lease_until=until.isoformat()).write(path)

    def terminate_instances(self, instances: Sequence[Instance]) -> None:
        """End every process of nodes, then forget the nodes; see `Provider.terminate_instances`."""
        # The name of a node stands in its id as well.
        keys = {(each.run_id, each.provider_instance_id.rpartition("/")[2]) for each in instances}
        leases = [LeaseFile.read(self._lease_path(*key)) for key in keys]
        self._processes.end(keys, [lease.leader for lease in leases if lease and lease.leader])
        for key in keys:
            self._lease_path(*key).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._run_folder(key[0]).rmdir()

    def list_instances(self, run_id: str | None = None) -> tuple[Instance, ...]:
        """Return nodes that have a lease file, and nodes that have only processes left."""
        found: dict[NodeKey, Instance] = {}
        for path in self._lease_paths(run_id):
            key = (path.parent.name, path.name.removesuffix(LEASE_SUFFIX))
            # Its end may have removed the file since it was listed.
            with contextlib.suppress(FileNotFoundError):
                found[key] = _instance(key, LeaseFile.read(path), launched_at_s=path.stat().st_mtime)
        for process, key in self._processes.tagged():
            if key not in found and run_id in (None, key[0]):
                found[key] = _instance(key, None, launched_at_s=process.create_time())
        return tuple(found[key] for key in sorted(found))

    def _start(self, request: NodeRequest, launch: Launch, *, rendezvous: str) -> LeaseFile:
        """Write the lease, start the process, write its identity; or adopt a node that is there."""
        run_id, bootstrap = launch.run_id, launch.bootstrap
        path = self._lease_path(run_id, request.node_id)
        known = LeaseFile.read(path)
        if known is not None and known.leader is not None:
            return known
        run_location = str(Path(bootstrap.run_location).resolve())
        folder = _node_folder(run_location, request.node_id)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _BOOTED).unlink(missing_ok=True)
        lease = LeaseFile(
            run_id=run_id,
            node_id=request.node_id,
            instance_type=request.offer.instance_type.name,
            run_directory=run_location,
            rendezvous=rendezvous,
            owner=ProcessIdentity.of(os.getpid()),
            launched_at=datetime.now(UTC).isoformat(),
            lease_until=launch.lease_until.isoformat(),
            leader=None,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        lease.write(path)
        environment = node_environment(
            replace(bootstrap, run_location=run_location),
            run_id=run_id,
            lease_s=self.lease_s,
            is_process=True,
            is_dry_run=self.is_dry_run,
        )
        leader = self._processes.start(
            (run_id, request.node_id),
            ["bash", str(BOOTSTRAP_SCRIPT), *bootstrap.arguments],
            environment=environment,
            console=folder / _CONSOLE,
        )
        lease = replace(lease, leader=leader)
        lease.write(path)
        return lease

    def _run_folder(self, run_id: str) -> Path:
        return self.state_directory / run_id

    def _lease_path(self, run_id: str, node_id: str) -> Path:
        return self._run_folder(run_id) / f"{node_id}{LEASE_SUFFIX}"

    def _lease_paths(self, run_id: str | None) -> list[Path]:
        folder = run_id if run_id is not None else "*"
        return sorted(self.state_directory.glob(f"{folder}/*{LEASE_SUFFIX}"))


def _instance(key: NodeKey, lease: LeaseFile | None, *, launched_at_s: float) -> Instance:
    """Return a node; `launched_at_s` counts where no lease says it."""
    return Instance(
        provider_instance_id=_instance_id(*key),
        run_id=key[0],
        node_id=key[1],
        instance_type=lease.instance_type if lease else "unknown",
        launched_at=datetime.fromisoformat(lease.launched_at)
        if lease
        else datetime.fromtimestamp(launched_at_s, tz=UTC),
        lease_until=moment_or_none(lease.lease_until) if lease else None,
        is_owner_dead=lease is not None and not lease.owner.is_alive(),
    )


def _instance_id(run_id: str, node_id: str) -> str:
    return f"{run_id}/{node_id}"


def _node_folder(run_directory: str, node_id: str) -> Path:
    return Path(run_directory) / "nodes" / node_id


def _console_tail(node_folder: Path) -> str:
    try:
        return (node_folder / _CONSOLE).read_text(errors="replace")[-_CONSOLE_TAIL_CHARACTERS:]
    except FileNotFoundError:
        return "(nothing)"
