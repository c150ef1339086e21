"""The ways between the computing devices of a topology: over the fewest links, and of those the widest.

Only NICs pass data on for others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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

    latency_seconds: Floats
    """Sum over the links; shape (N, N)."""

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
    bandwidth, latency = np.zeros((2, len(devices), len(devices)))
    for device in devices:
        for reached, (bytes_per_s, seconds) in _reachable(device.global_id, links_from, index_of).items():
            if reached in index_of:
                place = index_of[device.global_id], index_of[reached]
                bandwidth[place], latency[place] = bytes_per_s, seconds
    for source, target in np.argwhere(bandwidth == 0):
        raise ConfigurationError(
            f"every computing device must reach every other over links and NICs, but there is no way from "
            f"device {devices[source].global_id} to device {devices[target].global_id}"
        )
    return DevicePaths(devices=devices, bandwidth_bytes_per_s=bandwidth, latency_seconds=latency)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceGroup:
    """What the collectives of `communication_time.py` ask about the devices that take part."""

    num_ranks: int
    num_machines: int
    bandwidth_bytes_per_s: float
    """Of the slowest way between any two of them, infinite for one device."""


def device_group(topology: MachineTopology, device_ids: Sequence[int]) -> DeviceGroup:
    """Describe the devices with these global ids as a group.

    Raises:
        ConfigurationError: An id is not that of a computing device, or stands twice, or a device cannot be reached.
    """
    paths = device_paths(topology)
    index_of = {device.global_id: index for index, device in enumerate(paths.devices)}
    for device_id in device_ids:
        if device_id not in index_of or list(device_ids).count(device_id) > 1:
            raise ConfigurationError(
                f"a group must name computing devices once each, got {device_id} in {tuple(device_ids)}"
            )
    rows = [index_of[device_id] for device_id in device_ids]
    machine_of = topology.machine_of()
    return DeviceGroup(
        num_ranks=len(rows),
        num_machines=len({machine_of[device_id] for device_id in device_ids}),
        bandwidth_bytes_per_s=float(paths.bandwidth_bytes_per_s[np.ix_(rows, rows)].min()),
    )


def _reachable(
    start: int, links_from: dict[int, list[DeviceLink]], computing: dict[int, int]
) -> dict[int, tuple[float, float]]:
    """Return bandwidth and latency of the way to each device that can be reached."""
    reached = {start: (np.inf, 0.0)}
    frontier = dict(reached)
    while frontier:
        found: dict[int, tuple[float, float]] = {}
        for device, (bytes_per_s, seconds) in frontier.items():
            if device != start and device in computing:
                continue
            for link in links_from[device]:
                width = min(bytes_per_s, link.bandwidth_bytes_per_s)
                if link.target not in reached and width > found.get(link.target, (0.0, 0.0))[0]:
                    found[link.target] = width, seconds + link.latency_seconds
        reached |= found
        frontier = found
    return reached
