"""Machines that are processes of this one: the whole line on a laptop, with the same steps as on a cloud.

An instance exists, as on a cloud, until it is ended, also after its process has finished.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Self

from heterps_core.errors import ConfigurationError
from heterps_core.plans.provisioning_plan import NodeRequest
from infra.bootstrap.node_start import BOOTSTRAP_SCRIPT
from infra.ledger.ledger_entry import Instance, moment_or_none
from infra.providers.base import Launch
from infra.providers.launching import ProcessProvider, Started, prepared_console
from infra.providers.local_processes import LeaseFile, NodeKey, NodeProcesses, ProcessIdentity
from infra.workspace import LOOPBACK, Workspace, free_loopback_port

LEASE_SUFFIX = ".lease.json"


class LocalProvider(ProcessProvider):
    """Runs each node as a session of processes on this machine."""

    name: ClassVar[str] = "local"
    is_dry_run: ClassVar[bool] = True
    machines_text: ClassVar[str] = "dry run here"
    runs_here: ClassVar[bool] = True

    def __init__(self, state_directory: Path) -> None:
        super().__init__()
        self.state_directory = state_directory.resolve()
        self._processes = NodeProcesses(self.state_directory)

    @classmethod
    def for_workspace(cls, workspace: Workspace, *, region: str) -> Self:
        """Make the provider of the leases of a workspace; see `Provider.for_workspace`."""
        return cls(workspace.leases_directory)

    def start(self, requests: Sequence[NodeRequest], launch: Launch) -> Iterator[Started]:
        """Start one node after the other; see `ProcessProvider.start`."""
        location = launch.bootstrap.run_location
        if "://" in location:
            raise ConfigurationError(f"the run directory of local nodes must be a local path, got {location}")
        return (self._start(request, launch) for request in requests)

    def living_nodes(self, run_id: str) -> set[str]:
        """Return the nodes with a living first process; see `ProcessProvider.living_nodes`."""
        leases = ((_key_of(path)[1], LeaseFile.read(path)) for path in self._lease_paths(run_id))
        return {node_id for node_id, lease in leases if lease and lease.leader and lease.leader.is_alive()}

    def renew_lease(self, run_id: str, *, until: datetime) -> None:
        """Move the leases of a run; see `Provider.renew_lease`."""
        for path in self._lease_paths(run_id):
            lease = LeaseFile.read(path)
            # A launch that is under way writes it once more.
            if lease is not None and lease.leader is not None:
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
                self._lease_path(*key).parent.rmdir()

    def list_instances(self, run_id: str | None = None) -> tuple[Instance, ...]:
        """Return nodes that have a lease file, and nodes that have only processes left."""
        found: dict[NodeKey, Instance] = {}
        for path in self._lease_paths(run_id):
            key = _key_of(path)
            # Its end may have removed the file since it was listed.
            with contextlib.suppress(FileNotFoundError):
                found[key] = _instance(key, LeaseFile.read(path), launched_at_s=path.stat().st_mtime)
        for process, key in self._processes.tagged():
            if key not in found and run_id in (None, key[0]):
                found[key] = _instance(key, None, launched_at_s=process.create_time())
        return tuple(found[key] for key in sorted(found))

    def _start(self, request: NodeRequest, launch: Launch) -> Started:
        """Write the lease, start the process, write its identity; or adopt a node that is there."""
        key = (launch.run_id, request.node_id)
        path = self._lease_path(*key)
        lease = LeaseFile.read(path)
        if lease is None or lease.leader is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            console = prepared_console(launch.bootstrap.run_location, request.node_id)
            lease = LeaseFile(
                instance_type=request.offer.instance_type.name,
                port=free_loopback_port(),
                owner=ProcessIdentity.of(os.getpid()),
                launched_at=datetime.now(UTC).isoformat(),
                lease_until=launch.lease_until.isoformat(),
            )
            lease.write(path)
            command = ["bash", str(BOOTSTRAP_SCRIPT), *launch.bootstrap.arguments]
            leader = self._processes.start(key, command, environment=self.variables(launch), console=console)
            lease = replace(lease, leader=leader)
            lease.write(path)
        return Started(LOOPBACK, _instance_id(*key), datetime.fromisoformat(lease.launched_at), lease.port)

    def _lease_path(self, run_id: str, node_id: str) -> Path:
        return self.state_directory / run_id / f"{node_id}{LEASE_SUFFIX}"

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


def _key_of(path: Path) -> NodeKey:
    return path.parent.name, path.name.removesuffix(LEASE_SUFFIX)


def _instance_id(run_id: str, node_id: str) -> str:
    return f"{run_id}/{node_id}"
