"""From the requests of a plan to the nodes of a cluster, for providers that start all nodes of a plan or none."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from heterps_core.cluster import Cluster, Node
from heterps_core.device_types import DEVICE_TYPES, OWN_DEVICE_TYPES
from heterps_core.errors import ConfigurationError, ProvisioningError
from heterps_core.hardware import hardware_name
from heterps_core.plans.provisioning_plan import NodeRequest, ProvisioningPlan
from heterps_core.training.node import OWN_DISKS_VARIABLE
from infra.checks import Check, tried
from infra.ledger.ledger import EndReason
from infra.providers.base import Launch, Provider
from infra.workspace import Workspace, has_run_store, location_in_store

DISK_OF_MACHINE = {OWN_DISKS_VARIABLE: "/var/tmp"}
"""Where a machine of a cluster keeps rows of tables that memory does not hold: the run directory may be on a file
server, and /tmp in memory."""

_POLL_INTERVAL_S = 0.2
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000


class Started(NamedTuple):
    """The machine that a request became."""

    address: str
    provider_instance_id: str
    launched_at: datetime


def launched_together(
    provider: Provider,
    plan: ProvisioningPlan,
    launch: Launch,
    *,
    start: Callable[[Sequence[NodeRequest]], Iterable[Started]],
    rendezvous: Callable[[Sequence[Node]], str],
) -> Cluster:
    """Start all machines of a plan; each stands in the ledger before and after.

    Args:
        start: Starts or adopts the machine of each request, in order, one by one or all at once; raises OSError or
            ProvisioningError.
        rendezvous: Returns host and port where workers meet.

    Raises:
        ProvisioningError: Not all could be started; what was started is ended.
    """
    run_id, ledger = launch.run_id, launch.ledger
    requests = plan.node_requests()
    for request in requests:
        ledger.intend(run_id, provider.name, request, at=provider.now())
    nodes: list[Node] = []
    try:
        for request, machine in zip(requests, start(requests), strict=True):
            instance_id = machine.provider_instance_id
            ledger.launched(run_id, request.node_id, provider_instance_id=instance_id, at=machine.launched_at)
            nodes.append(node_of(request, address=machine.address, provider_instance_id=instance_id))
    except (OSError, ProvisioningError) as problem:
        failed = requests[len(nodes) :]
        for request in failed:
            ledger.failed(run_id, request.node_id, reason=str(problem), at=provider.now())
        provider.end_run(run_id, ledger=ledger, reason=EndReason.LAUNCH_FAILED)
        if isinstance(problem, ProvisioningError):
            raise
        raise ProvisioningError(
            f"node {failed[0].node_id} could not be started: {problem}; what was started is ended"
        ) from problem
    return Cluster(
        run_id=run_id,
        provider=provider.name,
        nodes=tuple(nodes),
        rendezvous=rendezvous(nodes),
        created_at=datetime.now(UTC).isoformat(),
    )


def wait_until_up(
    cluster: Cluster, look: Callable[[], tuple[set[str], set[str]]], *, timeout_s: float
) -> None:
    """Return once all nodes of a cluster are up.

    Args:
        look: Returns the nodes that are alive, and those of them that are up.

    Raises:
        ProvisioningError: One ended, or is not up in time.
    """
    nodes, deadline_s = {node.node_id for node in cluster.nodes}, time.monotonic() + timeout_s
    while True:
        alive, up = look()
        if missing := nodes - (up if time.monotonic() > deadline_s else alive):
            raise ProvisioningError(
                f"{', '.join(sorted(missing))} of run {cluster.run_id} must be up within {timeout_s:.0f} s, and "
                f"ended before or did not start; see nodes/*/console.log in the run directory, which all must share"
            )
        if nodes <= up:
            return
        time.sleep(_POLL_INTERVAL_S)


def workspace_mark(workspace: Workspace) -> str:
    """Return the name of a workspace in a cluster: none looks after the machines of another one of the same user."""
    return f"{zlib.crc32(str(workspace.root).encode()):08x}"


def rendezvous_port(launch: int) -> int:
    """Return the port of a launch, by its number: two launches may share a machine."""
    return _FIRST_PORT + launch % _NUM_PORTS


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
