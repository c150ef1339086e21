"""Small topologies: machines whose devices share a NIC, and a network between all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from heterps_core.topology.machine_topology import NIC, Device, DeviceLink, Machine, MachineTopology


def link(source, target, bandwidth_bytes_per_s):
    return DeviceLink(source=source, target=target, bandwidth_bytes_per_s=float(bandwidth_bytes_per_s))


def device(global_id, local_id, model):
    device_type = "GPU" if "gpu" in model else "CPU"
    return Device(global_id=global_id, local_id=local_id, type=device_type, model=model)


def topology_to_json(topology):
    """Return the JSON form, with a field that nobody reads."""
    return {
        "machines": [
            {
                "hostname": machine.hostname,
                "addr": "10.0.0.1",
                "devices": [
                    {name: getattr(device, name) for name in ("global_id", "local_id", "type", "model")}
                    for device in machine.devices
                ],
                "links": [
                    {
                        "source_global_id": link.source,
                        "target_global_id": link.target,
                        "bandwidth": link.bandwidth_bytes_per_s / 1e9,
                    }
                    for link in machine.links
                ],
            }
            for machine in topology.machines
        ]
    }


def save_topology(topology, path):
    path.write_text(json.dumps(topology_to_json(topology)))


def make_topology(
    models: Sequence[Sequence[str]],
    *,
    inside_bytes_per_s: Sequence[float],
    network_bytes_per_s: Sequence[float],
) -> MachineTopology:
    """Return machines with devices of these models.

    Args:
        models: Per machine, of its devices.
        inside_bytes_per_s: Per machine, between any two of its devices and its NIC.
        network_bytes_per_s: Per machine, of its NIC; a way has the narrower of both.
    """
    nics = [sum(len(row) + 1 for row in models[: index + 1]) - 1 for index in range(len(models))]
    machines = []
    for index, row in enumerate(models):
        nic = nics[index]
        ids = range(nic - len(row), nic + 1)
        machines.append(
            Machine(
                hostname=f"node{index}",
                devices=(
                    *(
                        device(id_, local, model)
                        for local, (id_, model) in enumerate(zip(ids, row, strict=False))
                    ),
                    Device(global_id=nic, local_id=0, type=NIC),
                ),
                links=(
                    *(link(a, b, inside_bytes_per_s[index]) for a in ids for b in ids if a != b),
                    *(
                        link(
                            nic,
                            other,
                            min(network_bytes_per_s[index], network_bytes_per_s[place]),
                        )
                        for place, other in enumerate(nics)
                        if place != index
                    ),
                ),
            )
        )
    return MachineTopology(machines=tuple(machines))
