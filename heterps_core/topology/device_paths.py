"""The ways between the computing devices of a topology: over the fewest links, and of those the widest.

Only NICs pass data on for others.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from heterps_core.errors import ConfigurationError
from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.topology.machine_topology import Device, DeviceLink, MachineTopology


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePaths:
    """Ways between N computing devices."""

    devices: tuple[Device, ...]
    bandwidth_bytes_per_s: Floats
    """Of the narrowest link on the way from row to column, infinite on the diagonal; shape (N, N)."""

    @property
    def seconds_per_byte(self) -> Floats:
        """Inverse of the bandwidth, 0 on the diagonal; shape (N, N)."""
        return 1 / self.bandwidth_bytes_per_s


def device_paths(topology: MachineTopology) -> DevicePaths:
    """Find the ways between all pairs of computing devices.

    Raises:
        ConfigurationError: A device cannot be reached from another.
    """
    devices = tuple(device for device in topology.devices() if device.computes)
    index_of = {device.global_id: index for index, device in enumerate(devices)}
    links_from: dict[int, list[DeviceLink]] = defaultdict(list)
    for link in topology.links():
        links_from[link.source].append(link)
    bandwidth = np.zeros((len(devices), len(devices)))
    for device in devices:
        for reached, bytes_per_s in _reachable(device.global_id, links_from, index_of).items():
            if reached in index_of:
                bandwidth[index_of[device.global_id], index_of[reached]] = bytes_per_s
    for source, target in np.argwhere(bandwidth == 0):
        raise ConfigurationError(
            f"every computing device must reach every other over links and NICs, but there is no way from "
            f"device {devices[source].global_id} to device {devices[target].global_id}"
        )
    return DevicePaths(devices=devices, bandwidth_bytes_per_s=bandwidth)


def _reachable(
    start: int, links_from: dict[int, list[DeviceLink]], computing: dict[int, int]
) -> dict[int, float]:
    """Return the bandwidth of the way to each device that can be reached."""
    reached = {start: np.inf}
    frontier = dict(reached)
    while frontier:
        found: dict[int, float] = {}
        for device, bytes_per_s in frontier.items():
            if device != start and device in computing:
                continue
            for link in links_from[device]:
                width = min(bytes_per_s, link.bandwidth_bytes_per_s)
                if link.target not in reached:
                    found[link.target] = max(width, found.get(link.target, 0.0))
        reached |= found
        frontier = found
    return reached
