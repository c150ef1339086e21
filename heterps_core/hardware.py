"""Hardware for rent: device types, whose units plans count, and instance types and offers, which cost money."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from heterps_core.errors import ConfigurationError
from heterps_core.json_codec import JsonDocument

AWS = "aws"

ARCHITECTURES = ("x86_64", "arm64")
"""Architectures of machine images, as EC2 names them."""

PAYLOAD_SHARE = 0.97
"""Share of a network's published bandwidth that tensors get: headers and acknowledgments take 2 to 4 %, measured
between hosts with frames of 9,001 bytes (`python -m tests.benchmarks measured_clusters`)."""

MAX_UNITS_PER_INSTANCE = 512
"""Largest machine that is believed; a guard against files of other programs."""

MAX_RESERVED = 64
"""Most reserved instances of a type; a proof has a column for each number of them."""

SPOT_SUFFIX = "-spot"
"""Ends the names of device types that are bought on spot."""


def hardware_name(device_type: str) -> str:
    """Return the name of a device type without its market: a machine on spot is as fast.

    Example:
        >>> hardware_name("gpu-t4-spot")
        'gpu-t4'
    """
    return device_type.removesuffix(SPOT_SUFFIX)


def is_gpu(device_type: str) -> bool:
    """Tell whether a device type is a card, as its name says, also that of a problem file.

    Example:
        >>> [is_gpu(name) for name in ("gpu-t4-spot", "cpu-c7i", "local-cpu", "gpu")]
        [True, False, False, True]
    """
    return "gpu" in device_type


class Market(StrEnum):
    """How an instance is bought."""

    ON_DEMAND = "on-demand"
    SPOT = "spot"


class DeviceKind(StrEnum):
    """Kind of a device type's unit: a processor core, or an accelerator card with its host."""

    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceType:
    """A machine size that a provider rents."""

    name: str
    vcpus: int
    """Hardware threads, or physical cores on types without simultaneous multithreading."""

    memory_bytes: int
    accelerator_name: str | None
    """Lower-case short name, for instance "t4"; None without an accelerator."""

    accelerator_count: int
    accelerator_memory_bytes_each: int
    network_bandwidth_bytes_per_s: float
    """Sustained baseline of the whole instance; 0 where the provider publishes none."""

    disk_bandwidth_bytes_per_s: float = 0.0
    """To network disks, of the whole instance; 0 where the provider publishes none."""

    @property
    def family(self) -> str:
        """The name without its size.

        Example:
            >>> [family_of(name) for name in ("g4dn.xlarge", "g2-standard-4")]
            ['g4dn', 'g2-standard']
        """
        return family_of(self.name)

    @property
    def is_metal(self) -> bool:
        """Without a hypervisor, so that it may take 20 minutes until it can be reached (Amazon EC2 User Guide).

        No unit costs less in such a size than in others of its family (139 sizes, prices of 2026-07-20).
        """
        return self.name.partition(".")[2].startswith("metal")


def family_of(name: str) -> str:
    """Return the name of an instance type without its size, which follows a dot or the last hyphen."""
    return name.partition(".")[0] if "." in name else name.rpartition("-")[0] or name


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """A price that does not change any more, with its time and its source; offers, machines and bills carry one."""

    price_usd_per_hour: float
    price_as_of: str
    """When the price was true: an ISO 8601 date or time."""

    price_source: str
    """Publisher of the price."""

    @property
    def price(self) -> dict[str, Any]:
        """These fields, for what takes the price over."""
        return {name: getattr(self, name) for name in Price.__dataclass_fields__}


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceOffer(Price, JsonDocument):
    """An instance type at a price, in a cloud, region, zone and market, at a time, by a source."""

    instance_type: InstanceType
    region: str
    zone: str | None
    """None where the price holds in every zone of the region."""

    market: Market
    cloud: str = AWS
    """The provider, in lower case."""

    interruptions_per_hour: float = 0.0
    """How often such an instance is preempted: 0 on-demand, above 0 on spot."""

    count: int | None = None
    """Such machines that there are; None where as many as are asked for may be available."""

    interruptions_source: str = ""
    """Where that figure comes from; empty on-demand."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.price_usd_per_hour) and self.price_usd_per_hour >= 0):
            raise ConfigurationError(
                f"the price of {self.instance_type.name} must be a number of USD per hour that is not negative, "
                f"got {self.price_usd_per_hour}; leave offers without a price out"
            )
        moment_of(self.price_as_of)
        if not (math.isfinite(self.interruptions_per_hour) and self.interruptions_per_hour >= 0):
            raise ConfigurationError(
                f"interruptions of {self.instance_type.name} must be 0 or more per hour, "
                f"got {self.interruptions_per_hour}"
            )

    @property
    def is_reserved(self) -> bool:
        """It is rented, and paid for whether or not a plan takes it."""
        return self.count is not None and self.cloud == AWS

    @property
    def place(self) -> str:
        """The zone, or the region where the price holds in all its zones."""
        return self.zone or self.region

    def price_age(self, now: datetime) -> timedelta:
        """Return how old the price is; `now` carries a time zone."""
        return now - moment_of(self.price_as_of)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceType:
    """Hardware that a layer is placed on, with the published figures of one unit.

    One unit is what one replica occupies: a physical core of a CPU type, or a card with its host of a
    GPU type. Peaks are never reached; profiles calibrate them per kind of layer.
    """

    name: str
    """Contains "cpu" or "gpu"."""

    kind: DeviceKind
    peak_fp32_flops_per_s: float
    """Dense single precision without TF32 or sparsity."""

    peak_bf16_flops_per_s: float | None = None
    """Dense products of bfloat16; None where the hardware has no instruction for them."""

    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    """Memory that a stage may fill: the card's own memory, or the core's share of the host's."""

    network_bandwidth_bytes_per_s: float
    """One unit's share of its instance's network; sizes with a smaller share do not carry the type."""

    local_disk_bytes: float = 0.0
    """The core's share of its instance's own disks."""

    local_disk_bytes_per_s: float = 0.0
    """The same of their speed, read and written by turns; 0 where it is not known."""

    kernel_launch_seconds: float = 5e-6
    """Fixed cost of one operation, however small its tensors.

    Assumed, as no vendor publishes the cost of an operation under a framework: the order of a launch in NVIDIA
    Technical Blog, Getting Started with CUDA Graphs (2019), and of PyTorch's dispatch."""

    vcpus_per_unit: int = 0
    """CPU types: vCPUs of one physical core. GPU types: 0, because units are counted in cards."""

    accelerator_name: str | None = None
    """As in `InstanceType.accelerator_name`."""

    instance_families: tuple[str, ...]
    """Families of instances that carry this type, of any cloud."""

    architecture: str = ARCHITECTURES[0]
    """Architecture of the machine image that its instances boot, one of `ARCHITECTURES`."""

    equal_families: tuple[str, ...] = ()
    """Other families with this processor or card, and no less memory and network: as fast, and bought where the
    first are not available."""

    market: Market = Market.ON_DEMAND
    """How units of this type are bought; the name of one on spot ends with SPOT_SUFFIX."""

    @property
    def families(self) -> tuple[str, ...]:
        """Families that carry this type, and equal ones."""
        return (*self.instance_families, *self.equal_families)

    @property
    def tensor_bandwidth_bytes_per_s(self) -> float:
        """Network bandwidth for tensors, in each of the two directions at once."""
        return PAYLOAD_SHARE * self.network_bandwidth_bytes_per_s

    def in_market(self, market: Market) -> DeviceType:
        """Return the same hardware as bought in a market."""
        name = hardware_name(self.name)
        return replace(self, name=name + SPOT_SUFFIX if market is Market.SPOT else name, market=market)

    def units_in(self, offer: InstanceOffer) -> int:
        """Return how many units an instance of an offer carries; 0 where it is sold in another market."""
        return self.units_of(offer.instance_type) if offer.market is self.market else 0

    def units_of(self, instance_type: InstanceType) -> int:
        """Return how many units an instance carries; 0 where it carries none.

        Example:
            >>> from heterps_core.device_types import DEVICE_TYPES
            >>> t4_host = InstanceType(name="g4dn.12xlarge", vcpus=48, memory_bytes=0, accelerator_name="t4",
            ...     accelerator_count=4, accelerator_memory_bytes_each=0, network_bandwidth_bytes_per_s=0.0)
            >>> DEVICE_TYPES["gpu-t4"].units_of(t4_host), DEVICE_TYPES["cpu-c5"].units_of(t4_host)
            (4, 0)
        """
        return self._units_of(instance_type) if instance_type.family in self.instance_families else 0

    def equal_units_of(self, instance_type: InstanceType) -> int:
        """Return the same for the families that are as fast as well."""
        return self._units_of(instance_type) if instance_type.family in self.families else 0

    def _units_of(self, instance_type: InstanceType) -> int:
        if self.kind is DeviceKind.CPU:
            units = instance_type.vcpus // self.vcpus_per_unit
        elif instance_type.accelerator_name == self.accelerator_name:
            units = instance_type.accelerator_count
        else:
            units = 0
        return units if self._has_network_for(units, instance_type) else 0

    def _has_network_for(self, units: int, instance_type: InstanceType) -> bool:
        published = instance_type.network_bandwidth_bytes_per_s
        # Published in whole Mbit/s, so a share may come out a little short.
        return published == 0 or published > 0.99 * units * self.network_bandwidth_bytes_per_s


def moment_of(text: str) -> datetime:
    """Read an ISO 8601 date or time; without a zone it is UTC.

    Raises:
        ConfigurationError: The text is neither.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(
            f"a time must be written as in ISO 8601, for instance 2026-07-20, got {text!r}"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
