"""The device types that plans place layers on, derived from the published figures in `published/`.

A unit is a core of a processor, or a card with its host. Families of one processor are one device type where clock,
memory, network, disk bandwidth and local disk of their units agree within `TOLERANCE`; the type has the least over
all sizes. The families of a card are one type. `hardware.toml` has the processors, cards and families left out.
"""

from __future__ import annotations

import csv
import fnmatch
import gzip
import io
import math
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from heterps_core.errors import ConfigurationError, UnknownNameError
from heterps_core.hardware import SPOT_SUFFIX, DeviceKind, DeviceType, InstanceType, Market, family_of
from heterps_core.json_codec import from_json
from heterps_core.units import BYTES_PER_MIB, BYTES_PER_S_PER_MBIT_PER_S

TOLERANCE = 0.1
"""Largest relative difference between units of one device type."""

NETWORK_STEP = 4.0
"""Sizes with this many times the network of the smallest host are a further type: a dense tower on a T4 can consume
four times the data that the smallest host's network delivers."""

_ROUNDING = 0.99
"""Bandwidths are published in whole Mbit/s, so a share may be slightly below the exact value."""

_MBIT_PER_GBIT = 1_000

_S_PER_MB_PER_S_PER_TB = 1e-6
"""1 MB/s for each TB: the share of a disk's size that it moves in a second."""

_PUBLISHED = Path(__file__).with_name("published")
_TABLE = _PUBLISHED / "instance_types_2026-07-20.csv.gz"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Processor:
    """A processor generation and the instance families that have it."""

    families: tuple[str, ...]
    fp32_flops_per_cycle: float
    bf16_flops_per_cycle: float | None = None
    socket_bytes_per_s: float
    socket_cores: int
    vcpus_per_core: int = 2
    clock_hz: float | None = None
    architecture: str = "x86_64"
    sources: Mapping[str, str]
    """Sources of the figures: flops, memory and, where it has a peak, bf16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Card:
    """A card and the instance families that have it."""

    families: tuple[str, ...]
    accelerator_name: str | None = None
    """Name in the table of instance types, where it differs from the card's."""

    peak_fp32_flops_per_s: float
    peak_bf16_flops_per_s: float | None = None
    memory_bandwidth_bytes_per_s: float
    sources: Mapping[str, str]
    """Sources of the figures: flops, memory and, where it has a peak, bf16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _LocalDisks:
    """Speeds of the local disks of instance families, which grow with the size of the disks."""

    families: tuple[str, ...]
    read_mb_per_s_per_tb: float
    write_mb_per_s_per_tb: float
    source: str
    is_of_sibling: bool = False
    """The figures are those of families with the same processor."""

    @property
    def bytes_per_s_per_byte(self) -> float:
        """Speed of sweeps, which read and write equal numbers of bytes in turns, for each byte of the size."""
        return _S_PER_MB_PER_S_PER_TB * 2 / (1 / self.read_mb_per_s_per_tb + 1 / self.write_mb_per_s_per_tb)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """The tables of `hardware.toml`."""

    processors: Mapping[str, _Processor]
    cards: Mapping[str, _Card]
    local_disks: Mapping[str, _LocalDisks]
    left_out: Mapping[str, tuple[str, ...]]
    """Reason -> families."""


class _Size(NamedTuple):
    """A row of the table of instance types."""

    instance: InstanceType
    clock_hz: float
    local_disk_bytes: float
    local_disk_bytes_per_s: float
    """0 where the family has no published figures."""


class _Core(NamedTuple):
    """A core's clock and its share of the instance."""

    clock_hz: float
    memory_bytes: float
    network_bytes_per_s: float
    disk_bytes_per_s: float
    local_disk_bytes: float
    local_disk_bytes_per_s: float

    @classmethod
    def of(cls, size: _Size, processor: _Processor) -> _Core:
        """Return the share of one core in an instance; an unpublished bandwidth is infinite."""
        instance, cores = size.instance, size.instance.vcpus // processor.vcpus_per_core
        return cls(
            clock_hz=processor.clock_hz or size.clock_hz,
            memory_bytes=instance.memory_bytes / cores,
            network_bytes_per_s=instance.network_bandwidth_bytes_per_s / cores or math.inf,
            disk_bytes_per_s=instance.disk_bandwidth_bytes_per_s / cores or math.inf,
            local_disk_bytes=size.local_disk_bytes / cores,
            local_disk_bytes_per_s=size.local_disk_bytes_per_s / cores,
        )

    @classmethod
    def least(cls, cores: Sequence[_Core]) -> _Core:
        return cls(*map(min, zip(*cores, strict=True)))

    def agrees_with(self, other: _Core) -> bool:
        return all(math.isclose(*pair, rel_tol=TOLERANCE) for pair in zip(self, other, strict=True))

    def has_no_less_than(self, other: _Core) -> bool:
        return all(own >= _ROUNDING * least for own, least in zip(self, other, strict=True))


def get_device_type(name: str) -> DeviceType:
    """Look a device type up by name; the name of a known one with SPOT_SUFFIX is that type on spot.

    Raises:
        UnknownNameError: There is no such type.

    Example:
        >>> get_device_type("gpu-t4-spot").market, get_device_type("gpu-t4-spot").instance_families[0]
        (<Market.SPOT: 'spot'>, 'g4dn')
    """
    hardware = name.removesuffix(SPOT_SUFFIX)
    known = {**DEVICE_TYPES, **OWN_DEVICE_TYPES}
    if hardware not in known:
        raise UnknownNameError("device type", name, known, command="heterps catalogue")
    return known[hardware].in_market(Market.SPOT if hardware != name else Market.ON_DEMAND)


def in_markets(device_types: Sequence[str], markets: Sequence[Market]) -> list[str]:
    """Return the names of device types as bought in each of some markets.

    Raises:
        UnknownNameError: There is no such type.

    Example:
        >>> in_markets(["cpu-c7i", "gpu-t4"], [Market.ON_DEMAND, Market.SPOT])
        ['cpu-c7i', 'cpu-c7i-spot', 'gpu-t4', 'gpu-t4-spot']
    """
    names = [get_device_type(name).in_market(market).name for name in device_types for market in markets]
    return list(dict.fromkeys(names))


def matching(patterns: Sequence[str]) -> list[str]:
    """Return the names of device types that match shell patterns; a pattern without a match stays as it is.

    Example:
        >>> matching(["gpu-t4*", "cpu-c7i", "gpu-t5"])
        ['gpu-t4', 'gpu-t4-20gbit', 'cpu-c7i', 'gpu-t5']
    """
    names = (name for pattern in patterns for name in fnmatch.filter(DEVICE_TYPES, pattern) or [pattern])
    return list(dict.fromkeys(names))


def hardware_of(device_type: str) -> str:
    """Return the processor or card of a device type; its own name where no table has it.

    Example:
        >>> hardware_of("gpu-t4-20gbit-spot"), hardware_of("cpu-r6in"), hardware_of("cpu")
        ('t4', 'ice-lake', 'cpu')
    """
    known = DEVICE_TYPES.get(device_type.removesuffix(SPOT_SUFFIX))
    tables: dict[str, _Processor | _Card] = {**HARDWARE.processors, **HARDWARE.cards}
    family = known.instance_families[0] if known else None
    return next((name for name, each in tables.items() if family in each.families), device_type)


def left_out() -> dict[str, str]:
    """Return each instance family without a device type, with its reason."""
    reasons = {family: reason for reason, families in HARDWARE.left_out.items() for family in families}
    used = {family for each in DEVICE_TYPES.values() for family in each.instance_families}
    known = {family_of(row["instance_type"]) for row in _rows()}
    no_figures = "no figures; add it to a processor or card of hardware.toml"
    return {family: reasons.get(family, no_figures) for family in sorted(known - used)}


def derived(hardware: Hardware) -> dict[str, DeviceType]:
    """Return the device types of processors and cards, by name.

    Raises:
        ConfigurationError: A family of theirs has no sizes in the table of instance types.
    """
    speeds = {family: each for each in hardware.local_disks.values() for family in each.families}
    sizes: dict[str, list[_Size]] = defaultdict(list)
    for row in _rows():
        if row["vcpus"]:
            sizes[row["family"]].append(_size(row, speeds.get(row["family"])))
    of_processors = [family for each in hardware.processors.values() for family in each.families]
    of_cards = [family for each in hardware.cards.values() for family in each.families]
    for family in (*of_processors, *of_cards, *speeds):
        if family not in sizes:
            raise ConfigurationError(
                f"each family of hardware.toml must have sizes in {_TABLE.name}, but {family} has none; add them, or "
                f"move the family to left_out"
            )
    kept = {family for family in sizes if not any(family in each for each in hardware.left_out.values())}
    cards = {
        name: replace(card, families=families)
        for name, card in hardware.cards.items()
        if (families := tuple(family for family in card.families if family in kept))
    }
    types = [
        *(each for processor in hardware.processors.values() for each in _core_types(processor, sizes)),
        *(each for name, card in cards.items() for each in _card_types(name, card, sizes)),
    ]
    return {each.name: each for each in types}


def _core_types(processor: _Processor, sizes: Mapping[str, Sequence[_Size]]) -> Iterator[DeviceType]:
    """Yield a device type for each set of families with equal cores, named by the family of the shortest name."""
    cores = {
        family: _Core.least([_Core.of(size, processor) for size in sizes[family]])
        for family in sorted(processor.families, key=lambda name: (len(name), name))
    }
    groups: dict[str, list[str]] = {}
    for family, core in cores.items():
        first = next((name for name in groups if core.agrees_with(cores[name])), family)
        groups.setdefault(first, []).append(family)
    for first, group in groups.items():
        least = _Core.least([cores[family] for family in group])
        others = [name for name, core in cores.items() if name not in group and core.has_no_less_than(least)]
        bf16 = processor.bf16_flops_per_cycle
        yield DeviceType(
            name=f"cpu-{first}",
            kind=DeviceKind.CPU,
            peak_fp32_flops_per_s=processor.fp32_flops_per_cycle * least.clock_hz,
            peak_bf16_flops_per_s=None if bf16 is None else bf16 * least.clock_hz,
            memory_bandwidth_bytes_per_s=processor.socket_bytes_per_s / processor.socket_cores,
            memory_bytes=int(least.memory_bytes),
            network_bandwidth_bytes_per_s=least.network_bytes_per_s,
            local_disk_bytes=least.local_disk_bytes,
            local_disk_bytes_per_s=least.local_disk_bytes_per_s,
            vcpus_per_unit=processor.vcpus_per_core,
            architecture=processor.architecture,
            instance_families=tuple(group),
            equal_families=tuple(others),
        )


def _card_types(name: str, card: _Card, sizes: Mapping[str, Sequence[_Size]]) -> Iterator[DeviceType]:
    """Yield a device type for all sizes with a card, and further ones for sizes with a faster network."""
    hosts = [size.instance for family in card.families for size in sizes[family]]
    shares = {size.network_bandwidth_bytes_per_s / size.accelerator_count for size in hosts}
    least = min(shares)
    device_type = DeviceType(
        name=f"gpu-{name}",
        kind=DeviceKind.GPU,
        peak_fp32_flops_per_s=card.peak_fp32_flops_per_s,
        peak_bf16_flops_per_s=card.peak_bf16_flops_per_s,
        memory_bandwidth_bytes_per_s=card.memory_bandwidth_bytes_per_s,
        memory_bytes=min(size.accelerator_memory_bytes_each for size in hosts),
        network_bandwidth_bytes_per_s=least,
        accelerator_name=card.accelerator_name or name,
        instance_families=card.families,
    )
    yield device_type
    while faster := [share for share in shares if share >= NETWORK_STEP * least]:
        least = min(faster)
        gbit_per_s = least / BYTES_PER_S_PER_MBIT_PER_S / _MBIT_PER_GBIT
        yield replace(
            device_type, name=f"gpu-{name}-{gbit_per_s:.0f}gbit", network_bandwidth_bytes_per_s=least
        )


def _rows() -> list[dict[str, str]]:
    """Return the table of instance types."""
    return list(csv.DictReader(io.StringIO(gzip.decompress(_TABLE.read_bytes()).decode())))


def _size(row: Mapping[str, str], local_disks: _LocalDisks | None) -> _Size:
    instance = InstanceType(
        name=row["instance_type"],
        vcpus=int(row["vcpus"]),
        memory_bytes=int(row["memory_mib"]) * BYTES_PER_MIB,
        accelerator_name=row["gpu_name"] or None,
        accelerator_count=int(row["gpu_count"] or 0),
        accelerator_memory_bytes_each=int(row["gpu_memory_mib_each"] or 0) * BYTES_PER_MIB,
        network_bandwidth_bytes_per_s=float(row["network_bandwidth_mbps"] or 0) * BYTES_PER_S_PER_MBIT_PER_S,
        disk_bandwidth_bytes_per_s=float(row["ebs_bandwidth_mbps"] or 0) * BYTES_PER_S_PER_MBIT_PER_S,
    )
    local_disk_bytes = float(row["local_nvme_gb"] or 0) * 1e9
    return _Size(
        instance=instance,
        clock_hz=float(row["cpu_clock_mhz"]) * 1e6,
        local_disk_bytes=local_disk_bytes,
        local_disk_bytes_per_s=0.0
        if local_disks is None
        else local_disk_bytes * local_disks.bytes_per_s_per_byte,
    )


HARDWARE: Hardware = from_json(
    Hardware, tomllib.loads((_PUBLISHED / "hardware.toml").read_text(encoding="utf-8"))
)

DEVICE_TYPES: dict[str, DeviceType] = derived(HARDWARE)
"""By name."""

OWN_DEVICE_TYPES: dict[str, DeviceType] = {}
"""The same of the machines that people have, once they were read (`infra/inventory.py`)."""
