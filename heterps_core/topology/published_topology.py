"""From the machines of a plan or of a run to a topology, with published figures where nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from heterps_core.cluster import Cluster
from heterps_core.device_types import get_device_type
from heterps_core.hardware import DeviceKind, DeviceType
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from heterps_core.profiling.profiles.layer_profile import Link
from heterps_core.topology.communication_time import PADDLE_LATENCIES, PCIE_SECONDS
from heterps_core.topology.machine_topology import (
    Device,
    DeviceLink,
    LinkType,
    Machine,
    MachineTopology,
    TopologyDevice,
)

PCIE_BYTES_PER_S = 12e9
"""Through a PCIe host bridge; a sample value of PaddlePaddle's cluster files."""


class _Node(Protocol):
    """What a planned and a launched node have in common."""

    @property
    def node_id(self) -> str: ...
    @property
    def device_type(self) -> str: ...
    @property
    def num_workers(self) -> int: ...


def topology_of_plan(
    plan: ProvisioningPlan, *, machine_link: Link | None = None, network_link: Link | None = None
) -> MachineTopology:
    """Return the topology of the machines that a plan buys; their addresses are their node ids.

    Each replica gets a device, each machine one NIC. Every machine reaches every other one.

    Args:
        plan: The instances of every stage.
        machine_link: Measured between two workers of one machine. Otherwise cores copy through their memory at
            half of one core's published bandwidth, since a copy reads and writes, and cards go through PCIe.
        network_link: Measured between two workers of different machines. Otherwise each worker has its published
            share of its machine's network.

    Raises:
        UnknownNameError: A device type is in no table.
    """
    requests = plan.node_requests()
    return _topology(requests, [request.node_id for request in requests], machine_link, network_link)


def topology_of_cluster(
    cluster: Cluster, *, machine_link: Link | None = None, network_link: Link | None = None
) -> MachineTopology:
    """Return the topology of a run's machines; see `topology_of_plan`.

    Raises:
        UnknownNameError: A device type is in no table.
    """
    return _topology(cluster.nodes, [node.address for node in cluster.nodes], machine_link, network_link)


def _topology(
    nodes: Sequence[_Node], addresses: Sequence[str], machine_link: Link | None, network_link: Link | None
) -> MachineTopology:
    types = [get_device_type(node.device_type) for node in nodes]
    shares = [
        device_type.network_bandwidth_bytes_per_s
        if network_link is None
        else network_link.bandwidth_bytes_per_s
        for device_type in types
    ]
    latency_seconds = (
        PADDLE_LATENCIES.inter_machine_seconds if network_link is None else network_link.latency_seconds
    )
    firsts = [sum(node.num_workers + 1 for node in nodes[:index]) for index in range(len(nodes))]
    nics = [first + node.num_workers for first, node in zip(firsts, nodes, strict=True)]
    machines = []
    for index, node in enumerate(nodes):
        workers = range(firsts[index], nics[index])
        within = _machine_link(types[index]) if machine_link is None else machine_link
        links = [
            _link(
                source, target, LinkType.LOC if types[index].kind is DeviceKind.CPU else LinkType.PHB, within
            )
            for source in workers
            for target in workers
            if source != target
        ]
        to_nic = Link(latency_seconds=0.0, bandwidth_bytes_per_s=shares[index])
        for worker in workers:
            links.append(_link(worker, nics[index], LinkType.PHB, to_nic))
            links.append(_link(nics[index], worker, LinkType.PHB, to_nic))
        for other, nic in enumerate(nics):
            if other != index:
                narrower = min(shares[i] * nodes[i].num_workers for i in (index, other))
                network = Link(latency_seconds=latency_seconds, bandwidth_bytes_per_s=narrower)
                links.append(_link(nics[index], nic, LinkType.NET, network))
        machines.append(
            Machine(
                hostname=node.node_id,
                address=addresses[index],
                port=None,
                devices=(
                    *(_device(types[index], worker, worker - firsts[index]) for worker in workers),
                    Device(global_id=nics[index], local_id=0, type=TopologyDevice.NIC),
                ),
                links=tuple(links),
            )
        )
    return MachineTopology(machines=tuple(machines))


def _machine_link(device_type: DeviceType) -> Link:
    bandwidth_bytes_per_s = PCIE_BYTES_PER_S
    if device_type.kind is DeviceKind.CPU:
        bandwidth_bytes_per_s = device_type.memory_bandwidth_bytes_per_s / 2
    return Link(latency_seconds=PCIE_SECONDS, bandwidth_bytes_per_s=bandwidth_bytes_per_s)


def _device(device_type: DeviceType, global_id: int, local_id: int) -> Device:
    return Device(
        global_id=global_id,
        local_id=local_id,
        type=TopologyDevice(device_type.kind.value.upper()),
        model=device_type.name,
        single_precision_flops_per_s=device_type.peak_fp32_flops_per_s,
        memory_bytes=device_type.memory_bytes,
    )


def _link(source: int, target: int, link_type: LinkType, link: Link) -> DeviceLink:
    return DeviceLink(
        source=source,
        target=target,
        type=link_type,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        latency_seconds=link.latency_seconds,
    )
