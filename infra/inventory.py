"""The machines that people have: kinds with counts, sizes and prices, in the file machines.toml of a workspace.

A kind is a device type of the planner as a rented one is: `cpu-KIND` by the core, and `gpu-KIND` by the card. Until
such a machine is measured, a core or card counts as that of a device type of the catalogue.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from heterps_core.device_types import DEVICE_TYPES, get_device_type
from heterps_core.errors import ConfigurationError, MalformedDocumentError, UnknownNameError
from heterps_core.field_rules import Count, NotNegative, Positive, Text, count
from heterps_core.hardware import (
    MAX_RESERVED,
    MAX_UNITS_PER_INSTANCE,
    DeviceKind,
    DeviceType,
    InstanceOffer,
    InstanceType,
    Market,
)
from heterps_core.json_codec import JsonDocument, JsonForm, check_fields, to_json
from heterps_core.units import BYTES_PER_S_PER_MBIT_PER_S
from infra.prices.price_catalogue import PriceCatalogue, PriceFile
from infra.workspace import Workspace

HERE = "here"
HOMES = (HERE, "ray", "slurm")
"""Providers of machines that people have."""

_NAME = "machines.toml"
_BYTES_PER_GB = 1e9
_MBIT_PER_GBIT = 1e3
_USUAL_CORE, _USUAL_CARD = "cpu-c6i", "gpu-t4"
"""Device types that count for a core or card of which nothing else is known."""

_DISK_BYTES_PER_S = 2e8
"""Assumed of a machine's disk, read and written by turns: the order of a SATA SSD."""

_KIND = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_Cores = Annotated[int, count(MAX_UNITS_PER_INSTANCE)]


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineKind(JsonDocument):
    """Machines of one home that are alike; sizes and price are those of one machine.

    Raises:
        MalformedDocumentError, UnknownNameError: A value breaks its rule.
    """

    json_form = JsonForm(what="machine", is_strict=True, omits_defaults=True)

    kind: Text
    home: Text
    """The provider that launches nodes on them: one of `HOMES`."""

    count: Count
    """Machines of this kind: the cap on units of a plan."""

    cores: _Cores
    memory_gb: Positive
    cards: int = 0
    card: str = ""
    """Name of the cards, such as "NVIDIA A100"."""

    disk_gb: NotNegative = 0.0
    network_gbit_per_s: Positive = 10.0
    price_usd_per_hour: NotNegative
    like: str = ""
    """The device type of the catalogue whose figures count for a core, or where a machine has cards for a card."""

    selector: Mapping[str, str | int | float] = field(default_factory=dict)
    """How the home names these machines: Slurm partition, features or gres, Ray resources or labels."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.home not in HOMES:
            raise UnknownNameError("home of machines", self.home, HOMES)
        if not _KIND.fullmatch(self.kind) or re.search("cpu|gpu|spot", self.kind):
            rule = "must be lower-case letters, digits and hyphens between, without cpu, gpu and spot"
            raise MalformedDocumentError("kind", f"{rule}, got {self.kind!r}")
        families = {family for each in DEVICE_TYPES.values() for family in each.families}
        if self.kind in families or {self.kind, *self._names} & {*DEVICE_TYPES}:
            raise MalformedDocumentError(
                "kind", f"must not be a name of heterps catalogue, got {self.kind!r}; name it own-{self.kind}"
            )
        if not 0 <= self.cards <= MAX_UNITS_PER_INSTANCE:
            raise MalformedDocumentError(
                "cards", f"must lie in 0..{MAX_UNITS_PER_INSTANCE}, got {self.cards}"
            )
        if self.like:
            get_device_type(self.like)

    @property
    def _names(self) -> tuple[str, str]:
        return f"cpu-{self.kind}", f"gpu-{self.kind}"

    @property
    def device_kinds(self) -> tuple[DeviceKind, ...]:
        """What a stage may have of these machines; cores beside cards serve the cards, but on this machine."""
        if not self.cards:
            return (DeviceKind.CPU,)
        return (DeviceKind.CPU, DeviceKind.GPU) if self.home == HERE else (DeviceKind.GPU,)

    def device_types(self) -> Iterator[DeviceType]:
        """Yield a device type for its cores, and for its cards; figures of both are those of `like`."""
        network_bytes_per_s = self.network_gbit_per_s * _MBIT_PER_GBIT * BYTES_PER_S_PER_MBIT_PER_S
        for device_kind in self.device_kinds:
            is_cpu = device_kind is DeviceKind.CPU
            like = self._like(device_kind)
            units = self.cores if is_cpu else self.cards
            memory_bytes = self.memory_gb * _BYTES_PER_GB / self.cores
            yield replace(
                like,
                name=self._names[not is_cpu],
                memory_bytes=int(memory_bytes) if is_cpu else like.memory_bytes,
                network_bandwidth_bytes_per_s=network_bytes_per_s / units,
                local_disk_bytes=self.disk_gb * _BYTES_PER_GB / units,
                local_disk_bytes_per_s=_DISK_BYTES_PER_S / units,
                vcpus_per_unit=int(is_cpu),
                instance_families=(self.kind,),
                equal_families=(),
            )

    def _like(self, device_kind: DeviceKind) -> DeviceType:
        named = [get_device_type(self.like)] if self.like else []
        words = re.split(r"[\s-]+", self.card.lower())
        cards = [each for each in DEVICE_TYPES.values() if each.accelerator_name in words]
        usual = _USUAL_CORE if device_kind is DeviceKind.CPU else _USUAL_CARD
        candidates = [*named, *cards, get_device_type(usual)]
        return next(each for each in candidates if each.kind is device_kind)

    def offers(self) -> Iterator[InstanceOffer]:
        """Yield its machines at their price; of one here that has cards its cores, and its cards."""
        for device_kind in self.device_kinds:
            num_cards = self.cards if device_kind is DeviceKind.GPU else 0
            card = self._like(DeviceKind.GPU)
            yield InstanceOffer(
                instance_type=InstanceType(
                    # What precedes the dot is the family, which the device types name.
                    name=f"{self.kind}.{f'{num_cards}gpu' if num_cards else self.cores}",
                    # Cores beside cards are sold by themselves, or not at all.
                    vcpus=0 if num_cards else self.cores,
                    memory_bytes=int(self.memory_gb * _BYTES_PER_GB),
                    accelerator_name=card.accelerator_name if num_cards else None,
                    accelerator_count=num_cards,
                    accelerator_memory_bytes_each=card.memory_bytes if num_cards else 0,
                    network_bandwidth_bytes_per_s=0.0,
                ),
                count=self.count,
                cloud=self.home,
                region="",
                zone=None,
                market=Market.ON_DEMAND,
                price_usd_per_hour=self.price_usd_per_hour,
                price_as_of=datetime.now(UTC).isoformat(),
                price_source=_NAME,
            )


def kind_name(*words: object) -> str:
    """Return words of a home as the name of a kind.

    Example:
        >>> kind_name("slurm", "gpu_long", 32, 1)
        'slurm-long-32-1'
    """
    text = re.sub("cpu|gpu|spot", " ", " ".join(map(str, words)).lower())
    return "-".join(re.findall(r"[a-z0-9]+", text))


def inventory_path(workspace: Workspace) -> Path:
    """Return where the machines of a workspace are listed."""
    return workspace.root / _NAME


def read_inventory(workspace: Workspace) -> tuple[MachineKind, ...]:
    """Return the kinds of machines that are listed; none where there is no file. Raises as `_read`."""
    return _read(workspace).machines


def read_reserved(workspace: Workspace) -> tuple[ReservedInstances, ...]:
    """Return the reserved instances that are listed. Raises as `_read`."""
    return _read(workspace).reserved


def reserved_offers(
    workspace: Workspace, catalogue: PriceCatalogue, *, region: str
) -> tuple[InstanceOffer, ...]:
    """Return the reserved instances of a region. Raises as `_read` and `ReservedInstances.offers`."""
    listed = (each for each in read_reserved(workspace) if each.region == region)
    return tuple(offer for each in listed for offer in each.offers(catalogue))


def _read(workspace: Workspace) -> _Inventory:
    """Read the file.

    Raises:
        ConfigurationError: The file cannot be read, is no TOML, or a value breaks its rule; names the file.
    """
    path = inventory_path(workspace)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        inventory = _Inventory.from_json(document)
        names = [kind.kind for kind in inventory.machines]
        if twice := {name for name in names if names.count(name) > 1}:
            raise MalformedDocumentError("machines", f"must have each kind once, but has twice {min(twice)}")
    except FileNotFoundError:
        return _Inventory()
    except OSError as error:
        raise ConfigurationError(f"cannot read the machines of {path}: {error.strerror}") from error
    except (ValueError, ConfigurationError) as error:
        raise ConfigurationError(
            f"{path}: {str(error).rstrip('.')}; edit it as docs/HOMES.md says"
        ) from error
    return inventory


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnPrices(PriceFile):
    """The prices that people give for their machines."""

    kinds: tuple[MachineKind, ...]

    def offers(self) -> Iterator[InstanceOffer]:
        """Yield the offers of all kinds."""
        for kind in self.kinds:
            yield from kind.offers()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservedInstances(JsonDocument):
    """Instances of the cloud that are reserved or paid for already, and are free at night."""

    json_form = JsonForm(what="reserved", is_strict=True)

    instance_type: Text
    region: Text
    count: Annotated[int, count(MAX_RESERVED)]

    def offers(self, catalogue: PriceCatalogue) -> Iterator[InstanceOffer]:
        """Yield the instances at no price.

        Raises:
            UnknownNameError: The region has no such type.
        """
        sold = {
            offer.instance_type.name: offer
            for offer in catalogue.offers(region=self.region, market=Market.ON_DEMAND)
        }
        if self.instance_type not in sold:
            raise UnknownNameError(f"reserved instance type of {self.region}", self.instance_type, sold)
        yield replace(sold[self.instance_type], count=self.count, price_usd_per_hour=0.0, price_source=_NAME)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inventory(JsonDocument):
    """The whole file."""

    json_form = JsonForm(what="inventory", is_strict=True, omits_defaults=True)

    machines: tuple[MachineKind, ...] = ()
    reserved: tuple[ReservedInstances, ...] = ()


def inventory_text(kinds: Iterable[MachineKind], reserved: Iterable[ReservedInstances] = ()) -> str:
    """Return the file of some kinds of machines and reserved instances."""
    import tomlkit

    return tomlkit.dumps(to_json(_Inventory(machines=tuple(kinds), reserved=tuple(reserved))))
