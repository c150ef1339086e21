"""The device types that plans place layers on; `device_types.toml` has the published figures of one unit."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from heterps_core.errors import UnknownNameError
from heterps_core.hardware import SPOT_SUFFIX, DeviceType, Market
from heterps_core.json_codec import from_json


def get_device_type(name: str) -> DeviceType:
    """Look a device type up by name; the name of a known one with SPOT_SUFFIX is that type on spot.

    Raises:
        UnknownNameError: The table has no such type.

    Example:
        >>> get_device_type("gpu-t4-spot").market, get_device_type("gpu-t4-spot").instance_families[0]
        (<Market.SPOT: 'spot'>, 'g4dn')
    """
    hardware = name.removesuffix(SPOT_SUFFIX)
    if hardware not in DEVICE_TYPES:
        raise UnknownNameError("device type", name, DEVICE_TYPES)
    return DEVICE_TYPES[hardware].in_market(Market.SPOT if hardware != name else Market.ON_DEMAND)


def in_markets(device_types: Sequence[str], markets: Sequence[Market]) -> list[str]:
    """Return the names of device types as bought in each of some markets.

    Raises:
        UnknownNameError: The table has no such type.

    Example:
        >>> in_markets(["cpu-c7i", "gpu-t4"], [Market.ON_DEMAND, Market.SPOT])
        ['cpu-c7i', 'cpu-c7i-spot', 'gpu-t4', 'gpu-t4-spot']
    """
    names = [get_device_type(name).in_market(market).name for name in device_types for market in markets]
    return list(dict.fromkeys(names))


_LAUNCH_SOURCE = (
    "assumed: no vendor publishes the cost of an operation under a framework; 5 microseconds is the order of "
    "a launch in NVIDIA Technical Blog, Getting Started with CUDA Graphs (2019), and of PyTorch's dispatch"
)


def _published() -> dict[str, DeviceType]:
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for name, table in tables.items():
        table["name"] = name
        table["sources"]["kernel_launch_seconds"] = _LAUNCH_SOURCE
    return {name: from_json(DeviceType, table) for name, table in tables.items()}


DEVICE_TYPES: dict[str, DeviceType] = _published()
"""By name, with the source of each figure."""
