"""What machines there are, what their devices can do, and how fast they reach one another.

The unified cluster object of adaptive distributed training on PaddlePaddle (arXiv 2112.02752), in the JSON form of
its released code. It is about hardware only: who works where in a run, at which address and price, is said by
`heterps_core/cluster.py`, from which `published_topology.py` makes a topology. Its file has GFLOPS, GB, GB/s and ms;
here are the units of the rest of the core.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from heterps_core.errors import MalformedProblemError
from heterps_core.planning.problem.field_checks import check_not_negative, check_positive, check_text, shown

MAX_PORT = 65_535


class TopologyDevice(StrEnum):
    """Kinds of devices; a NIC only passes data on."""

    CPU = "CPU"
    GPU = "GPU"
    XPU = "XPU"
    NPU = "NPU"
    DCU = "DCU"
    NIC = "NIC"


class LinkType(StrEnum):
    """Ways between two devices."""

    LOC = "LOC"
    """Within one device, or through the memory that both share."""

    SYS = "SYS"
    """Across the processors' interconnect."""

    PHB = "PHB"
    """Through a PCIe host bridge."""

    PIX = "PIX"
    """Through one PCIe bridge."""

    PIB = "PIB"
    """Through several PCIe bridges."""

    NVL = "NVL"
    """Over NVLink."""

    NVB = "NVB"
    """Over NVLink by way of another device."""

    NET = "NET"
    """Over the network, between machines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device of a machine."""

    global_id: int
    """Unique over all machines."""

    local_id: int
    """Unique within its machine among devices of its type."""

    type: TopologyDevice
    model: str = ""
    """What a plan calls the device type, for instance "gpu-t4"; empty for a NIC."""

    single_precision_flops_per_s: float = 0.0
    """Peak; 0 for a NIC."""

    double_precision_flops_per_s: float | None = None
    """Peak; None where nobody says."""

    memory_bytes: int = 0

    @property
    def computes(self) -> bool:
        """Whether a rank can run on it."""
        return self.type is not TopologyDevice.NIC


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLink:
    """A way from one device to another, in this direction only; it is listed at the machine where it begins."""

    source: int
    """Global id."""

    target: int
    type: LinkType
    bandwidth_bytes_per_s: float
    latency_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One machine with its devices and the links that begin there."""

    hostname: str
    address: str
    port: int | None
    """None where none is assigned yet."""

    devices: tuple[Device, ...]
    links: tuple[DeviceLink, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineTopology:
    """All machines that ranks can be placed on.

    Raises:
        MalformedProblemError: A value breaks its rule, or ids do not fit together; carries the path of the field
            in the JSON form.
    """

    machines: tuple[Machine, ...]

    def __post_init__(self) -> None:
        if not self.machines:
            raise MalformedProblemError("machines", "must hold at least one machine, got none")
        _check_unique("machines", "hostname", [machine.hostname for machine in self.machines])
        machine_of: dict[int, int] = {}
        for index, machine in enumerate(self.machines):
            _check_machine(f"machines[{index}]", machine)
            for place, device in enumerate(machine.devices):
                if device.global_id in machine_of:
                    raise MalformedProblemError(
                        f"machines[{index}].devices[{place}].global_id",
                        f"must be unique over all machines, but {device.global_id} stands twice",
                    )
                machine_of[device.global_id] = index
        if not any(device.computes for device in self.devices()):
            raise MalformedProblemError("machines", "must hold at least one device that computes")
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


def _check_machine(path: str, machine: Machine) -> None:
    check_text(f"{path}.hostname", machine.hostname)
    check_text(f"{path}.addr", machine.address)
    if machine.port is not None:
        _check_id(f"{path}.port", machine.port)
        if not 1 <= machine.port <= MAX_PORT:
            raise MalformedProblemError(f"{path}.port", f"must lie in 1..{MAX_PORT}, got {machine.port}")
    if not machine.devices:
        raise MalformedProblemError(f"{path}.devices", "must hold at least one device, got none")
    for index, device in enumerate(machine.devices):
        _check_device(f"{path}.devices[{index}]", device)
    names = [f"{device.type} {device.local_id}" for device in machine.devices]
    _check_unique(f"{path}.devices", "local_id", names)


def _check_device(path: str, device: Device) -> None:
    _check_id(f"{path}.global_id", device.global_id)
    _check_id(f"{path}.local_id", device.local_id)
    if device.computes:
        check_text(f"{path}.model", device.model)
        check_positive(f"{path}.sp_gflops", device.single_precision_flops_per_s)
        check_positive(f"{path}.memory", device.memory_bytes)
        if device.double_precision_flops_per_s is not None:
            check_not_negative(f"{path}.dp_gflops", device.double_precision_flops_per_s)


def _check_links(path: str, links: tuple[DeviceLink, ...], machine_of: dict[int, int], *, here: int) -> None:
    pairs = set()
    for index, link in enumerate(links):
        place = f"{path}[{index}]"
        for name, end in (("source_global_id", link.source), ("target_global_id", link.target)):
            _check_id(f"{place}.{name}", end)
            if end not in machine_of:
                raise MalformedProblemError(f"{place}.{name}", f"must be the id of a device, got {end}")
        if machine_of[link.source] != here:
            raise MalformedProblemError(
                f"{place}.source_global_id",
                f"must be a device of the machine that lists the link, got {link.source} of another one",
            )
        if link.source == link.target:
            raise MalformedProblemError(
                f"{place}.target_global_id",
                f"must be another device than the source, got {link.target} twice",
            )
        if (link.source, link.target) in pairs:
            raise MalformedProblemError(
                place, f"must be the only link from {link.source} to {link.target}, but is the second"
            )
        pairs.add((link.source, link.target))
        leaves = machine_of[link.target] != here
        if leaves is not (link.type is LinkType.NET):
            rule = "NET, because it leaves the machine" if leaves else "another than NET within a machine"
            raise MalformedProblemError(f"{place}.type", f"must be {rule}, got {link.type}")
        check_positive(f"{place}.bandwidth", link.bandwidth_bytes_per_s)
        check_not_negative(f"{place}.latency", link.latency_seconds)


def _check_id(path: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise MalformedProblemError(path, f"must be a whole number from 0 on, got {shown(value)}")


def _check_unique(path: str, name: str, values: list[str]) -> None:
    twice = sorted({str(value) for value in values if values.count(value) > 1})
    if twice:
        raise MalformedProblemError(path, f"must differ in {name}, but {', '.join(twice)} stands twice")
