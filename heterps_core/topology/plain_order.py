"""The placement that nobody thought about: ranks in order, each on the first free device of its type."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from heterps_core.errors import ConfigurationError
from heterps_core.topology.device_paths import device_paths
from heterps_core.topology.machine_topology import MachineTopology
from heterps_core.topology.rank_placement import placement_seconds
from heterps_core.topology.rank_traffic import RankTraffic


def plain_order_seconds(traffic: RankTraffic, topology: MachineTopology) -> float:
    """Return the seconds per step of ranks in plain order, in the measure of `RankPlacement.seconds_per_step`.

    Raises:
        ConfigurationError: There are too few devices of a type, or no way between two devices.
    """
    paths = device_paths(topology)
    free: dict[str, deque[int]] = defaultdict(deque)
    for index, device in enumerate(paths.devices):
        free[device.model].append(index)
    places = []
    for name in traffic.device_types:
        if not free[name]:
            raise ConfigurationError(f"each rank needs a device of its own, but all {name} devices are taken")
        places.append(free[name].popleft())
    return placement_seconds(np.array(places), traffic.bytes_per_step, paths.seconds_per_byte)
