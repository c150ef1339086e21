"""From the requests of a plan to the nodes of a cluster, for providers that start all nodes of a plan or none."""

from __future__ import annotations

import os
import time
import zlib
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from heterps_core.cluster import Cluster, Node
from heterps_core.device_types import DEVICE_TYPES, OWN_DEVICE_TYPES
from heterps_core.errors import ConfigurationError, ProvisioningError
from heterps_core.hardware import hardware_name
from heterps_core.plans.provisioning_plan import NodeRequest, ProvisioningPlan
from heterps_core.training.node import OWN_DISKS_VARIABLE
from infra.bootstrap.node_start import node_environment
from infra.checks import Check, tried
from infra.ledger.ledger import NO_MACHINE, EndReason, EntryState, Ledger, LedgerEntry
from infra.providers.base import Launch, Provider
from infra.workspace import Workspace, has_run_store, location_in_store

_POLL_INTERVAL_S = 0.1
_BOOTED, _CONSOLE = "booted", "console.log"
"""A mark that the bootstrap script makes in a node's folder of the run directory, and what the node prints."""

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000


class Started(NamedTuple):
    """The machine that a request became."""

    address: str
    provider_instance_id: str
    launched_at: datetime
    port: int = 0
    """Where workers meet, if this is the first machine; 0 leaves the choice open."""


class ProcessProvider(Provider):
    """Starts all nodes of a plan or none; each is a process that says in the run directory that it is up."""

    def __init__(self) -> None:
        self._locations: dict[str, str] = {}
        """Run directories of the launches of this process."""

    @abstractmethod
    def start(self, requests: Sequence[NodeRequest], launch: Launch) -> Iterator[Started]:
        """Check what can be checked before anything is started; return what starts or adopts machines, in order.

        That raises OSError or ProvisioningError where one cannot be started.

        Raises:
            ConfigurationError, ProvisioningError: These machines cannot be started here.
        """

    @abstractmethod
    def living_nodes(self, run_id: str) -> Collection[str]:
        """Return the nodes of a run with living processes."""

    def variables(self, launch: Launch) -> dict[str, str]:
        """Return the environment of the nodes of a launch.

        A machine of a cluster keeps rows of tables that memory does not hold in /var/tmp: the run directory may be on
        a file server, and /tmp in memory.
        """
        variables = node_environment(
            launch.bootstrap,
            run_id=launch.run_id,
            lease_s=self.lease_s,
            is_process=True,
            is_dry_run=self.is_dry_run,
        )
        return variables if self.runs_here else {**variables, OWN_DISKS_VARIABLE: "/var/tmp"}

    def launched(self, plan: ProvisioningPlan, launch: Launch) -> Cluster:
        """Start all machines of a plan; each stands in the ledger before and after. See `Provider.launch`."""
        run_id, ledger = launch.run_id, launch.ledger
        self._locations[run_id] = launch.bootstrap.run_location
        requests = plan.node_requests()
        machines = self.start(requests, launch)
        for request in requests:
            ledger.intend(run_id, self.name, request, at=self.now())
        nodes: list[Node] = []
        port = 0
        try:
            for request, machine in zip(requests, machines, strict=True):
                instance_id = machine.provider_instance_id
                ledger.launched(
                    run_id, request.node_id, provider_instance_id=instance_id, at=machine.launched_at
                )
                nodes.append(node_of(request, address=machine.address, provider_instance_id=instance_id))
                port = port or machine.port
        except (OSError, ProvisioningError) as problem:
            self.end_run(run_id, ledger=ledger, reason=EndReason.LAUNCH_FAILED, problem=str(problem))
            if isinstance(problem, ProvisioningError):
                raise
            raise ProvisioningError(
                f"node {requests[len(nodes)].node_id} could not be started: {problem}; what was started is ended"
            ) from problem
        # Two launches may share a machine.
        port = port or _FIRST_PORT + zlib.crc32(run_id.encode()) % _NUM_PORTS
        return Cluster(
            run_id=run_id,
            provider=self.name,
            nodes=tuple(nodes),
            rendezvous=f"{nodes[0].address}:{port}",
            created_at=datetime.now(UTC).isoformat(),
        )

    def end_run(
        self, run_id: str, *, ledger: Ledger, reason: EndReason, problem: str = NO_MACHINE
    ) -> tuple[str, ...]:
        """End all machines of a run; see `Provider.end_run`.

        A node that was up and that its home has forgotten, as after an outage, or does not tell of, is charged since
        it was up, to the end of its lease; a machine that was asked for and waits is none.
        """
        try:
            living = self.living_nodes(run_id)
        except ProvisioningError:
            self._note_lost_nodes(run_id, None, ledger=ledger, reason=reason, problem=problem)
            raise
        try:
            self._note_lost_nodes(run_id, living, ledger=ledger, reason=reason, problem=problem)
        finally:
            # A ledger that cannot be written must not keep a machine alive.
            ended = super().end_run(run_id, ledger=ledger, reason=reason, problem=problem)
        return ended

    def _note_lost_nodes(
        self, run_id: str, living: Collection[str] | None, *, ledger: Ledger, reason: EndReason, problem: str
    ) -> None:
        """Charge nodes that were up and do not live; where none can say which live (None), all that were up."""
        for entry in ledger.entries(run_id=run_id):
            node_id = entry.node_id
            if entry.state is not EntryState.INTENDED or node_id in (living or ()):
                continue
            up_at = self._up_since(entry)
            if up_at is None:
                if living is not None:
                    ledger.failed(run_id, node_id, reason=problem, at=self.now())
                continue
            ledger.launched(run_id, node_id, provider_instance_id=f"{run_id}/{node_id}", at=up_at)
            # Out of reach, it ends itself by then.
            lease_end = self.now() + timedelta(seconds=self.lease_s)
            ledger.ended(run_id, node_id, reason=reason, at=lease_end)

    def _up_since(self, entry: LedgerEntry) -> datetime | None:
        """Return when the bootstrap of a launch's node was through; None where it was not, or none can see it."""
        folder = _node_folder(self._locations.get(entry.run_id, "://"), entry.node_id)
        with suppress(OSError):
            if folder is not None:
                up_at = datetime.fromtimestamp((folder / _BOOTED).stat().st_mtime, tz=UTC)
                # That of an earlier launch is older.
                return up_at if up_at >= entry.intended_at else None
        return None

    def wait_until_ready(self, cluster: Cluster, *, timeout_s: float) -> None:
        """Return once each node's bootstrap is through; see `Provider.wait_until_ready`."""
        run_id, deadline_s = cluster.run_id, time.monotonic() + timeout_s
        location = self._locations[run_id]
        folders = {node.node_id: _node_folder(location, node.node_id) for node in cluster.nodes}
        while True:
            living = self.living_nodes(run_id)
            booting = {
                node_id for node_id, folder in folders.items() if folder and not (folder / _BOOTED).exists()
            }
            late = booting if time.monotonic() > deadline_s else set()
            for node_id in sorted((folders.keys() - living) | late):
                trouble = f"is not up after {timeout_s:.0f} s"
                if node_id not in living:
                    trouble = f"ended before {'it was' if node_id in booting else 'all were'} up"
                raise ProvisioningError(
                    f"node {node_id} of run {run_id} {trouble}; {_last_said(folders[node_id])}"
                )
            if not booting:
                return
            time.sleep(_POLL_INTERVAL_S)


def _node_folder(run_location: str, node_id: str) -> Path | None:
    """Return the folder of a node in the run directory; None in a bucket."""
    return None if "://" in run_location else Path(run_location) / "nodes" / node_id


def prepared_console(run_location: str, node_id: str) -> Path:
    """Return the file for the console of a node; nothing in its folder says yet that it is up."""
    folder = _node_folder(run_location, node_id)
    if folder is None:
        return Path(os.devnull)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _BOOTED).unlink(missing_ok=True)
    return folder / _CONSOLE


def _last_said(folder: Path | None) -> str:
    """Return the last line that a node printed."""
    if folder is None:
        return "what it printed is not kept where the run directory is a bucket, which its machine must reach"
    with suppress(OSError, ValueError):
        console = folder / _CONSOLE
        *_, last = filter(str.strip, console.read_text(errors="replace").split("\n"))
        return f"its console {console} ends with: {last}"
    return f"it printed nothing into {folder}, which all machines must share"


def workspace_mark(workspace: Workspace) -> str:
    """Return the name of a workspace in a cluster: none looks after the machines of another one of the same user."""
    return f"{zlib.crc32(str(workspace.root).encode()):08x}"


def run_directory_check(workspace: Workspace) -> Check:
    """Check the place where the flow and the nodes of a cluster meet, as far as this machine can see it."""

    def place() -> str:
        if has_run_store():
            return location_in_store("runs")
        folder = next(path for path in (workspace.root, *workspace.root.parents) if path.exists())
        if not os.access(folder, os.W_OK):
            raise ConfigurationError(f"the folder {folder} must be writable; set HETERPS_HOME to another one")
        return f"{workspace.root}, which all machines must share"

    return tried("run directory", place)


def node_of(request: NodeRequest, *, address: str, provider_instance_id: str) -> Node:
    """Return the node that a request became."""
    return Node(
        node_id=request.node_id,
        address=address,
        device_type=request.device_type,
        instance_type=request.offer.instance_type.name,
        market=request.offer.market,
        stage=request.stage,
        num_workers=request.num_workers,
        price_usd_per_hour=request.offer.price_usd_per_hour,
        provider_instance_id=provider_instance_id,
        disk_usd_per_hour=request.disk_usd_per_hour,
        own_disk_bytes=_own_disk_bytes(request),
        zone=request.offer.zone,
    )


def _own_disk_bytes(request: NodeRequest) -> float:
    """Return the size of a machine's own disks where rows of tables go there, as its stage was planned.

    Where no volume was bought, they go there too, at a speed that no plan knows.
    """
    hardware = {**DEVICE_TYPES, **OWN_DEVICE_TYPES}.get(hardware_name(request.device_type))
    if hardware is None or (request.disk_usd_per_hour > 0 and not hardware.local_disk_bytes_per_s):
        return 0.0
    return hardware.local_disk_bytes * hardware.equal_units_of(request.offer.instance_type)
