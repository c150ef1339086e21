"""What machines there are, and how fast their devices reach one another, as a JSON file describes it.

The cluster file of adaptive distributed training on PaddlePaddle (arXiv 2112.02752), as far as a placement needs it:
`{"machines": [{"hostname", "devices": [{"global_id", "local_id", "type", "model"}], "links": [{"source_global_id",
"target_global_id", "bandwidth"}]}]}`, with bandwidths in GB/s. Other fields are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from heterps_core.errors import MalformedDocumentError
from heterps_core.field_rules import check_number, check_positive, check_text, shown
from heterps_core.json_codec import as_object, member
from heterps_core.json_file import read_json

GIGA = 1e9

NIC = "NIC"
"""Type of a device that only passes data on."""

DEVICE_TYPES = ("CPU", "GPU", "XPU", "NPU", "DCU", NIC)

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device of a machine."""

    global_id: int
    """Unique over all machines."""

    local_id: int
    """Unique within its machine among devices of its type."""

    type: str
    """One of `DEVICE_TYPES`."""

    model: str = ""
    """What a plan calls the device type, for instance "gpu-t4"; empty for a NIC."""

    @property
    def computes(self) -> bool:
        """Whether a rank can run on it."""
        return self.type != NIC


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLink:
    """A way from one device to another, in this direction only; it is listed at the machine where it begins."""

    source: int
    """Global id."""

    target: int
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One machine with its devices and the links that begin there."""

    hostname: str
    devices: tuple[Device, ...]
    links: tuple[DeviceLink, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineTopology:
    """All machines that ranks can be placed on.

    Raises:
        MalformedDocumentError: A value breaks its rule, or ids do not fit together; carries the path of the field
            in the JSON form.
    """

    machines: tuple[Machine, ...]

    def __post_init__(self) -> None:
        if not self.machines:
            raise MalformedDocumentError("machines", "must hold at least one machine, got none")
        _check_unique("machines", "hostname", [machine.hostname for machine in self.machines])
        machine_of: dict[int, int] = {}
        for index, machine in enumerate(self.machines):
            path = f"machines[{index}].devices"
            if not machine.devices:
                raise MalformedDocumentError(path, "must hold at least one device, got none")
            _check_unique(
                path, "local_id", [f"{device.type} {device.local_id}" for device in machine.devices]
            )
            for place, device in enumerate(machine.devices):
                if device.global_id in machine_of:
                    raise MalformedDocumentError(
                        f"{path}[{place}].global_id",
                        f"must be unique over all machines, but {device.global_id} stands twice",
                    )
                machine_of[device.global_id] = index
        if not any(device.computes for device in self.devices()):
            raise MalformedDocumentError("machines", "must hold at least one device that computes")
        for index, machine in enumerate(self.machines):
            _check_links(f"machines[{index}].links", machine.links, machine_of, here=index)

    def devices(self) -> Iterator[Device]:
        """Return the devices of all machines, in order."""
        return (device for machine in self.machines for device in machine.devices)

    def links(self) -> Iterator[DeviceLink]:
        """Return the links of all machines, in order."""
        return (link for machine in self.machines for link in machine.links)

    def machine_of(self) -> dict[int, int]:
        """Return for each device's global id the index of its machine."""
        return {
            device.global_id: index
            for index, machine in enumerate(self.machines)
            for device in machine.devices
        }

    @classmethod
    def from_json(cls, document: object) -> MachineTopology:
        """Read the JSON form.

        Raises:
            MalformedDocumentError: A field is missing or breaks its rule; carries its path.
        """
        return cls(machines=_items(as_object("cluster", document), "", "machines", _machine))


def load_topology(path: Path) -> MachineTopology:
    """Read a cluster file.

    Raises:
        ConfigurationError: The file cannot be read.
        MalformedDocumentError: It is no JSON, or a field breaks its rule.
    """
    return MachineTopology.from_json(read_json(path, what="cluster"))


def _machine(path: str, document: object) -> Machine:
    fields = as_object(path, document)
    return Machine(
        hostname=_text(fields, path, "hostname"),
        devices=_items(fields, path, "devices", _device),
        links=_items(fields, path, "links", _link),
    )


def _device(path: str, document: object) -> Device:
    fields = as_object(path, document)
    device_type = member(fields, path, "type")
    if device_type not in DEVICE_TYPES:
        raise MalformedDocumentError(
            f"{path}.type", f"must be one of {', '.join(DEVICE_TYPES)}, got {shown(device_type)}"
        )
    return Device(
        global_id=_id(fields, path, "global_id"),
        local_id=_id(fields, path, "local_id"),
        type=device_type,
        model="" if device_type == NIC else _text(fields, path, "model"),
    )


def _link(path: str, document: object) -> DeviceLink:
    fields = as_object(path, document)
    bandwidth = check_number(f"{path}.bandwidth", member(fields, path, "bandwidth"))
    check_positive(f"{path}.bandwidth", bandwidth)
    return DeviceLink(
        source=_id(fields, path, "source_global_id"),
        target=_id(fields, path, "target_global_id"),
        bandwidth_bytes_per_s=bandwidth * GIGA,
    )


def _check_links(path: str, links: tuple[DeviceLink, ...], machine_of: dict[int, int], *, here: int) -> None:
    pairs = set()
    for index, link in enumerate(links):
        place = f"{path}[{index}]"
        for name, end in (("source_global_id", link.source), ("target_global_id", link.target)):
            if end not in machine_of:
                raise MalformedDocumentError(f"{place}.{name}", f"must be the id of a device, got {end}")
        if machine_of[link.source] != here:
            raise MalformedDocumentError(
                f"{place}.source_global_id",
                f"must be a device of the machine that lists the link, got {link.source} of another one",
            )
        if link.source == link.target:
            raise MalformedDocumentError(
                f"{place}.target_global_id",
                f"must be another device than the source, got {link.target} twice",
            )
        if (link.source, link.target) in pairs:
            raise MalformedDocumentError(
                place, f"must be the only link from {link.source} to {link.target}, but is the second"
            )
        pairs.add((link.source, link.target))


def _items(
    fields: Mapping[str, Any], path: str, name: str, read: Callable[[str, object], _Item]
) -> tuple[_Item, ...]:
    place = f"{path}.{name}" if path else name
    items = member(fields, path, name)
    if not isinstance(items, list):
        raise MalformedDocumentError(place, f"must be a list, got {shown(items)}")
    return tuple(read(f"{place}[{index}]", item) for index, item in enumerate(items))


def _text(fields: Mapping[str, Any], path: str, name: str) -> str:
    value = member(fields, path, name)
    check_text(f"{path}.{name}", value)
    return str(value)


def _id(fields: Mapping[str, Any], path: str, name: str) -> int:
    value = member(fields, path, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise MalformedDocumentError(
            f"{path}.{name}", f"must be a whole number from 0 on, got {shown(value)}"
        )
    return value


def _check_unique(path: str, name: str, values: list[str]) -> None:
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise MalformedDocumentError(path, f"must differ in {name}, but {', '.join(twice)} stands twice")
