"""Small topologies: machines whose devices share a NIC, and a network between all of them."""

from __future__ import annotations

from collections.abc import Sequence

from heterps_core.topology.machine_topology import (
    Device,
    DeviceLink,
    LinkType,
    Machine,
    MachineTopology,
    TopologyDevice,
)


def link(source, target, bandwidth_bytes_per_s, *, type=LinkType.PHB, latency_seconds=0.0):
    return DeviceLink(
        source=source,
        target=target,
        type=type,
        bandwidth_bytes_per_s=float(bandwidth_bytes_per_s),
        latency_seconds=latency_seconds,
    )


def device(global_id, local_id, model):
    return Device(
        global_id=global_id,
        local_id=local_id,
        type=TopologyDevice.GPU if "gpu" in model else TopologyDevice.CPU,
        model=model,
        single_precision_flops_per_s=8.1e12,
        memory_bytes=16 * 10**9,
    )


def make_topology(
    models: Sequence[Sequence[str]],
    *,
    inside_bytes_per_s: Sequence[float],
    network_bytes_per_s: Sequence[float],
    network_latency_seconds: float = 0.0,
) -> MachineTopology:
    """Return machines with devices of these models.

    Args:
        models: Per machine, of its devices.
        inside_bytes_per_s: Per machine, between any two of its devices and its NIC.
        network_bytes_per_s: Per machine, of its NIC; a way has the narrower of both.
        network_latency_seconds: Of the way between two NICs.
    """
    nics = [sum(len(row) + 1 for row in models[: index + 1]) - 1 for index in range(len(models))]
    machines = []
    for index, row in enumerate(models):
        nic = nics[index]
        ids = range(nic - len(row), nic + 1)
        machines.append(
            Machine(
                hostname=f"node{index}",
                address=f"10.0.0.{index}",
                port=None,
                devices=(
                    *(
                        device(id_, local, model)
                        for local, (id_, model) in enumerate(zip(ids, row, strict=False))
                    ),
                    Device(global_id=nic, local_id=0, type=TopologyDevice.NIC),
                ),
                links=(
                    *(link(a, b, inside_bytes_per_s[index]) for a in ids for b in ids if a != b),
                    *(
                        link(
                            nic,
                            other,
                            min(network_bytes_per_s[index], network_bytes_per_s[place]),
                            type=LinkType.NET,
                            latency_seconds=network_latency_seconds,
                        )
                        for place, other in enumerate(nics)
                        if place != index
                    ),
                ),
            )
        )
    return MachineTopology(machines=tuple(machines))
