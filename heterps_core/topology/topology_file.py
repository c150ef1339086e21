"""A machine topology as JSON: `{"machines": [{"hostname", "addr", "port", "devices": [...], "links": [...]}]}`.

The fields and units are those that PaddlePaddle's cluster file has: GFLOPS, GB of 1e9 bytes, GB/s and ms.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from heterps_core.errors import ConfigurationError, MalformedProblemError
from heterps_core.planning.problem.field_checks import (
    as_object,
    check_number,
    member,
    object_without_duplicates,
    shown,
)
from heterps_core.topology.machine_topology import (
    Device,
    DeviceLink,
    LinkType,
    Machine,
    MachineTopology,
    TopologyDevice,
)
from heterps_core.units import MS_PER_S

GIGA = 1e9
"""Of GFLOPS, GB and GB/s."""

_Item = TypeVar("_Item")
_Name = TypeVar("_Name", bound=StrEnum)


def topology_to_json(topology: MachineTopology) -> dict[str, Any]:
    """Return the JSON form."""
    return {
        "machines": [
            {
                "hostname": machine.hostname,
                "addr": machine.address,
                **({} if machine.port is None else {"port": machine.port}),
                "devices": [_device_to_json(device) for device in machine.devices],
                "links": [
                    {
                        "source_global_id": link.source,
                        "target_global_id": link.target,
                        "type": link.type.value,
                        "bandwidth": link.bandwidth_bytes_per_s / GIGA,
                        "latency": link.latency_seconds * MS_PER_S,
                    }
                    for link in machine.links
                ],
            }
            for machine in topology.machines
        ]
    }


def topology_from_json(document: object) -> MachineTopology:
    """Read the JSON form; fields that are not known are ignored.

    `port`, and `dp_gflops`, `model`, `sp_gflops` and `memory` of a NIC, may be missing.

    Raises:
        MalformedProblemError: A field is missing or breaks its rule; carries its path.
    """
    fields = as_object("cluster", document)
    return MachineTopology(machines=_items(fields, "", "machines", _machine_from_json))


def save_topology(topology: MachineTopology, path: Path) -> None:
    """Write the JSON form; a reader sees the old file or the new one, never a part."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(topology_to_json(topology), indent=1), encoding="utf-8")
    part.replace(path)


def load_topology(path: Path) -> MachineTopology:
    """Read a file of the JSON form.

    Raises:
        ConfigurationError: The file cannot be read.
        MalformedProblemError: It is no JSON, or a field breaks its rule.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=object_without_duplicates)
    except OSError as error:
        raise ConfigurationError(f"cannot read the cluster file {path}: {error.strerror}") from error
    except RecursionError as error:
        raise MalformedProblemError(str(path), "is nested too deeply for a cluster file") from error
    except ValueError as error:
        # No UTF-8, no JSON, or an integer of thousands of digits.
        raise MalformedProblemError(str(path), f"is not valid JSON: {error}") from error
    return topology_from_json(document)


def _device_to_json(device: Device) -> dict[str, Any]:
    document: dict[str, Any] = {
        "global_id": device.global_id,
        "local_id": device.local_id,
        "type": device.type.value,
    }
    if device.computes:
        document |= {
            "model": device.model,
            "sp_gflops": device.single_precision_flops_per_s / GIGA,
            "memory": device.memory_bytes / GIGA,
        }
        if device.double_precision_flops_per_s is not None:
            document["dp_gflops"] = device.double_precision_flops_per_s / GIGA
    return document


def _machine_from_json(path: str, document: object) -> Machine:
    fields = as_object(path, document)
    return Machine(
        hostname=member(fields, path, "hostname"),
        address=member(fields, path, "addr"),
        port=fields.get("port"),
        devices=_items(fields, path, "devices", _device_from_json),
        links=_items(fields, path, "links", _link_from_json),
    )


def _device_from_json(path: str, document: object) -> Device:
    fields = as_object(path, document)
    device_type = _named(TopologyDevice, f"{path}.type", member(fields, path, "type"))
    ids = {name: member(fields, path, name) for name in ("global_id", "local_id")}
    if device_type is TopologyDevice.NIC:
        return Device(**ids, type=device_type)
    return Device(
        **ids,
        type=device_type,
        model=member(fields, path, "model"),
        single_precision_flops_per_s=_number(fields, path, "sp_gflops") * GIGA,
        double_precision_flops_per_s=(
            _number(fields, path, "dp_gflops") * GIGA if fields.get("dp_gflops") is not None else None
        ),
        memory_bytes=round(_number(fields, path, "memory") * GIGA),
    )


def _link_from_json(path: str, document: object) -> DeviceLink:
    fields = as_object(path, document)
    return DeviceLink(
        source=member(fields, path, "source_global_id"),
        target=member(fields, path, "target_global_id"),
        type=_named(LinkType, f"{path}.type", member(fields, path, "type")),
        bandwidth_bytes_per_s=_number(fields, path, "bandwidth") * GIGA,
        latency_seconds=_number(fields, path, "latency") / MS_PER_S,
    )


def _items(
    fields: dict[str, Any], path: str, name: str, read: Callable[[str, object], _Item]
) -> tuple[_Item, ...]:
    place = f"{path}.{name}" if path else name
    items = member(fields, path, name)
    if not isinstance(items, list):
        raise MalformedProblemError(place, f"must be a list, got {shown(items)}")
    return tuple(read(f"{place}[{index}]", item) for index, item in enumerate(items))


def _number(fields: dict[str, Any], path: str, name: str) -> float:
    return check_number(f"{path}.{name}", member(fields, path, name))


def _named(names: type[_Name], path: str, value: object) -> _Name:
    known = [name.value for name in names]
    if value not in known:
        raise MalformedProblemError(path, f"must be one of {', '.join(known)}, got {shown(value)}")
    return names(value)
