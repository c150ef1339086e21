"""The charges of a run besides its instances: disks, addresses, requests and storage; list prices with their source.

They are small beside the machines, and they are not nothing: 33 nodes that beat every two seconds through a bucket
would pay 0.9 USD an hour for requests alone, an eighth of what the machines cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from heterps_core.training.node import BUCKET_HEARTBEAT_INTERVAL_S
from heterps_core.training.storage.store import StorageUsage
from heterps_core.units import SECONDS_PER_HOUR

HOURS_PER_MONTH = 730.0

INCLUDED_MIB_PER_S, MOST_MIB_PER_S = 125, 1_000
"""Throughput of a gp3 volume that its price includes, and the most that it can have (Amazon EBS User Guide)."""

_INCLUDED_IOPS, _IOPS_PER_MIB_PER_S = 3_000, 4
"""Operations of a gp3 volume that its price includes, and those without which EBS refuses a throughput: at most 0.25
MiB/s for each (Amazon EBS User Guide, General Purpose SSD volumes)."""

_LEASE_LOOK_INTERVAL_S = 60.0
_REQUESTS_PER_LOOK = 2


class ServiceRate(NamedTuple):
    """A list price."""

    unit: str
    usd_per_unit: float
    price_source: str
    price_as_of: str = "2026-07"


Rates = Mapping[str, ServiceRate]
"""Service -> its price in a region."""


_S3 = "aws.amazon.com/s3/pricing"

RATES: Rates = {
    "disks": ServiceRate("GB-month", 0.08, "aws.amazon.com/ebs/pricing, gp3, us-east-1"),
    "disks for tables": ServiceRate("USD", 1.0, "gp3 room and throughput at the launch's prices"),
    "disk throughput": ServiceRate(
        "MiB/s-month", 0.04, "aws.amazon.com/ebs/pricing, gp3 above 125 MiB/s, us-east-1"
    ),
    "disk operations": ServiceRate(
        "IOPS-month", 0.005, "aws.amazon.com/ebs/pricing, gp3 above 3,000, us-east-1"
    ),
    "public addresses": ServiceRate("hour", 0.005, "aws.amazon.com/vpc/pricing, public IPv4"),
    "requests that write or list": ServiceRate("1,000 requests", 0.005, f"{_S3}, Standard, us-east-1"),
    "requests that read": ServiceRate("1,000 requests", 0.0004, f"{_S3}, Standard, us-east-1"),
    "stored data": ServiceRate("GB-month", 0.023, f"{_S3}, Standard, us-east-1"),
    "traffic out of the region": ServiceRate("GB", 0.09, f"{_S3}, data transfer out to the internet"),
    "traffic between regions": ServiceRate(
        "GB", 0.02, "aws.amazon.com/ec2/pricing, data transfer from us-east-1 to another region"
    ),
}
"""List prices of us-east-1. A refresh replaces them for the regions that it asks (`region_rates.py`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceLine:
    """One service in a bill."""

    service: str
    quantity: float
    unit: str
    usd_per_unit: float
    price_as_of: str
    price_source: str
    usd: float


def disk_iops(mib_per_s: int) -> int:
    """Return the operations that a gp3 volume must have for a throughput.

    Example:
        >>> disk_iops(750), disk_iops(850)
        (3000, 3400)
    """
    return max(_INCLUDED_IOPS, _IOPS_PER_MIB_PER_S * mib_per_s)


def table_disk_usd_per_hour(*, gigabytes: float, mib_per_s: int, rates: Rates = RATES) -> float:
    """Return the price of more room and throughput of an instance's disk, and of the operations that this needs."""
    throughput = max(mib_per_s - INCLUDED_MIB_PER_S, 0) * rates["disk throughput"].usd_per_unit
    operations = (disk_iops(mib_per_s) - _INCLUDED_IOPS) * rates["disk operations"].usd_per_unit
    return (gigabytes * rates["disks"].usd_per_unit + throughput + operations) / HOURS_PER_MONTH


def usd_per_machine_hour(*, disk_gb_each: float) -> float:
    """Return the hourly cost of an instance besides its own price: disk, address, heartbeats and lease looks."""
    requests = StorageUsage(
        put_requests=round(SECONDS_PER_HOUR / BUCKET_HEARTBEAT_INTERVAL_S),
        get_requests=round(_REQUESTS_PER_LOOK * SECONDS_PER_HOUR / _LEASE_LOOK_INTERVAL_S),
    )
    lines = service_lines(instance_seconds=SECONDS_PER_HOUR, disk_gb_each=disk_gb_each, storage=requests)
    return sum(line.usd for line in lines)


def service_lines(
    *,
    instance_seconds: float,
    disk_gb_each: float,
    storage: StorageUsage | None = None,
    table_disk_usd: float = 0.0,
    rates: Rates = RATES,
) -> tuple[ServiceLine, ...]:
    """Return the charges of instances and their bucket besides the instances' own price.

    Transfer between machines of one zone and to a bucket of their region is free (aws.amazon.com/ec2/pricing).

    Args:
        instance_seconds: Of all instances; each has one disk, and at most one public address.
        table_disk_usd: Of the instances' room for rows of tables, at the prices of their launch.
    """
    hours = instance_seconds / SECONDS_PER_HOUR
    quantities = {
        "disks": disk_gb_each * hours / HOURS_PER_MONTH,
        "disks for tables": table_disk_usd,
        "public addresses": hours,
    }
    if storage is not None:
        quantities |= {
            "requests that write or list": storage.put_requests / 1_000,
            "requests that read": storage.get_requests / 1_000,
            "stored data": storage.stored_byte_s / 1e9 / SECONDS_PER_HOUR / HOURS_PER_MONTH,
            "traffic out of the region": storage.egress_bytes / 1e9,
            "traffic between regions": storage.crossing_bytes / 1e9,
        }
    return tuple(
        ServiceLine(
            service=name,
            quantity=quantity,
            usd=quantity * rates[name].usd_per_unit,
            **rates[name]._asdict(),
        )
        for name, quantity in quantities.items()
        if quantity > 0
    )
