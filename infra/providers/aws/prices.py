"""Prices of AWS: on-demand from the Pricing API, spot from the spot price history, sizes from EC2.

Questions are functions that receive the boto3 client. All of them page, and none asks once per type: a region takes
some dozen calls. The clients retry with botocore's adaptive mode, which slows down where AWS throttles.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from heterps_core.hardware import AWS, InstanceType, Market
from heterps_core.units import BYTES_PER_MIB, BYTES_PER_S_PER_MBIT_PER_S
from infra.ledger.ledger import LedgerEntry
from infra.prices.live_prices import LivePrices
from infra.prices.region_rates import BETWEEN_REGIONS, names_matching, traffic_to
from infra.prices.service_charges import RATES, ServiceRate
from infra.prices.spot_charges import SpotHistory
from infra.providers.aws.errors import aws_client, explained
from infra.providers.aws.queries import remembered_instances

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_pricing import PricingClient

_PRICING_REGION = "us-east-1"
"""The Pricing API answers in few regions, for all of them."""

_CLIENT_OPTIONS: dict[str, Any] = {
    "retries": {"mode": "adaptive", "max_attempts": 8},
    "connect_timeout": 10,
    "read_timeout": 30,
    "user_agent_extra": "heterps",
}

_PRODUCT_FILTERS = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}
"""What is bought when an instance is launched plainly; other products of the same type are other prices."""


_TRAFFIC = "AWSDataTransfer"
_GENERAL, _OUTBOUND = {"storageClass": "General Purpose"}, {"transferType": "AWS Outbound"}


class _Service(NamedTuple):
    """Products of the price list that are one rate of `service_charges.RATES`."""

    name: str
    code: str
    filters: Mapping[str, str]
    unit: str
    units: float = 1.0
    """USD per unit of the rate over USD per unit of the product."""


_SERVICES = (
    _Service("disks", "AmazonEC2", {"volumeApiName": "gp3"}, "GB-Mo"),
    _Service("disk operations", "AmazonEC2", {"volumeApiName": "gp3"}, "IOPS-Mo"),
    _Service("disk throughput", "AmazonEC2", {"volumeApiName": "gp3"}, "GiBps-mo", 1 / 1024),
    _Service("public addresses", "AmazonVPC", {"group": "VPCPublicIPv4Address"}, "Hrs"),
    _Service("requests that write or list", "AmazonS3", {"group": "S3-API-Tier1"}, "Requests", 1_000),
    _Service("requests that read", "AmazonS3", {"group": "S3-API-Tier2"}, "Requests", 1_000),
    _Service("stored data", "AmazonS3", {**_GENERAL, "volumeType": "Standard"}, "GB-Mo"),
    _Service("traffic out of the region", _TRAFFIC, {**_OUTBOUND, "toLocation": "External"}, "GB"),
    _Service(BETWEEN_REGIONS, _TRAFFIC, {"transferType": "InterRegion Outbound"}, "GB"),
)

_SPOT_PRODUCT = "Linux/UNIX"
_SPOT_SOURCE = "EC2 DescribeSpotPriceHistory, Linux/UNIX"

_MBIT_PER_GBIT = 1_000

_NAMES_PER_CALL = 200
"""Instance types of one question for spot prices: as many as EC2 takes values of a filter."""


class AwsPrices(LivePrices):
    """Asks AWS; see `LivePrices`."""

    cloud: ClassVar[str] = AWS
    on_demand_source: ClassVar[str] = "AWS Pricing API, Linux, on-demand"
    spot_source: ClassVar[str] = _SPOT_SOURCE

    def __init__(self, pricing: PricingClient, ec2_of_region: Callable[[str], EC2Client]) -> None:
        self.pricing = pricing
        self.ec2_of_region = ec2_of_region

    @classmethod
    def with_own_clients(cls) -> AwsPrices:
        """Return one with boto3's own search for credentials."""
        from botocore.config import Config

        options = Config(**_CLIENT_OPTIONS)
        pricing = aws_client("pricing", region=_PRICING_REGION, config=options)
        return cls(pricing, lambda region: aws_client("ec2", region=region, config=options))

    @staticmethod
    def regions_named(patterns: Sequence[str]) -> list[str]:
        """Return those that boto3 knows of; see `LivePrices.regions_named`."""
        import boto3

        with explained("name its regions"):
            known = boto3.session.Session().get_available_regions("ec2")
        return names_matching(patterns, known, family="region of AWS")

    def on_demand(self, region: str) -> dict[str, float]:
        """Ask the Pricing API; see `LivePrices.on_demand`."""
        with explained(f"give on-demand prices in {region}"):
            found = self._products("AmazonEC2", {**_PRODUCT_FILTERS, "regionCode": region})
            return _highest((each.get("instanceType"), usd) for each, unit, usd in found if unit == "Hrs")

    def rates(self, region: str, *, now: datetime) -> dict[str, ServiceRate]:
        """Ask the Pricing API; see `LivePrices.rates`."""
        rates: dict[str, ServiceRate] = {}
        for each in _SERVICES:
            of = "fromRegionCode" if each.code == _TRAFFIC else "regionCode"
            with explained(f"give prices of {each.name} in {region}"):
                found = self._products(each.code, {**each.filters, of: region})
                to_regions = each.name == BETWEEN_REGIONS
                usd = _highest(
                    (traffic_to(about.get("toRegionCode", "")) if to_regions else each.name, usd * each.units)
                    for about, unit, usd in found
                    if unit == each.unit
                )
            rates |= {
                name: ServiceRate(RATES[each.name].unit, price, "AWS Pricing API", f"{now:%Y-%m-%d}")
                for name, price in usd.items()
            }
        return rates

    def _products(
        self, service_code: str, filters: Mapping[str, str]
    ) -> Iterator[tuple[dict[str, str], str, float]]:
        """Yield attributes, unit and USD of each price of products that match filters."""
        pages = self.pricing.get_paginator("get_products").paginate(
            ServiceCode=service_code,
            FormatVersion="aws_v1",
            Filters=[
                {"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in filters.items()
            ],
        )
        for text in (text for page in pages for text in page["PriceList"]):
            document: dict[str, Any] = json.loads(text)
            for term in document["terms"].get("OnDemand", {}).values():
                for dimension in term["priceDimensions"].values():
                    usd = float(dimension["pricePerUnit"].get("USD", 0.0))
                    yield document["product"]["attributes"], dimension["unit"], usd

    def spot(
        self, region: str, instance_types: Sequence[str], *, since: datetime
    ) -> dict[tuple[str, str], SpotHistory]:
        """Ask for the history of each instance type and zone."""
        with explained(f"give spot prices in {region}"):
            return _spot_histories(self.ec2_of_region(region), instance_types, since=since)

    def sizes(self, region: str, families: Iterable[str]) -> dict[str, InstanceType]:
        """Ask EC2 for sizes."""
        with explained(f"list instance types in {region}"):
            pages = (
                self.ec2_of_region(region)
                .get_paginator("describe_instance_types")
                .paginate(
                    Filters=[
                        {"Name": "instance-type", "Values": [f"{family}.*" for family in sorted(families)]}
                    ]
                )
            )
            found = [_instance_type_of(document) for page in pages for document in page["InstanceTypes"]]
        return {each.name: each for each in found}


def _spot_histories(
    client: EC2Client, names: Sequence[str], *, since: datetime
) -> dict[tuple[str, str], SpotHistory]:
    """Return (instance type, zone) -> price changes since a time, the one in force at that time included."""
    paginator = client.get_paginator("describe_spot_price_history")
    pages = (
        page
        for first in range(0, len(names), _NAMES_PER_CALL)
        for page in paginator.paginate(
            InstanceTypes=list(names[first : first + _NAMES_PER_CALL]),  # type: ignore[arg-type]
            ProductDescriptions=[_SPOT_PRODUCT],
            StartTime=since,
        )
    )
    changes: dict[tuple[str, str], dict[datetime, float]] = defaultdict(dict)
    for page in pages:
        for row in page["SpotPriceHistory"]:
            changes[row["InstanceType"], row["AvailabilityZone"]][row["Timestamp"]] = float(row["SpotPrice"])
    return {
        pool: SpotHistory(
            times=tuple(sorted(by_time)),
            prices_usd_per_hour=tuple(by_time[time] for time in sorted(by_time)),
            source=_SPOT_SOURCE,
        )
        for pool, by_time in changes.items()
    }


def prices_of_machines(
    client: EC2Client, workspace: str, entries: Collection[LedgerEntry]
) -> dict[str, SpotHistory]:
    """Return the price history of the type and zone of each spot machine, by its id."""
    launched_at = {
        entry.provider_instance_id: entry.launched_at
        for entry in entries
        if entry.market is Market.SPOT and entry.provider_instance_id and entry.launched_at
    }
    if not launched_at:
        return {}
    pools = {
        instance["InstanceId"]: (instance["InstanceType"], instance["Placement"]["AvailabilityZone"])
        for instance in remembered_instances(client, workspace, list(launched_at))
        if instance["InstanceId"] in launched_at
    }
    names = sorted({name for name, _ in pools.values()})
    histories = _spot_histories(client, names, since=min(launched_at.values()))
    return {instance_id: histories[pool] for instance_id, pool in pools.items() if pool in histories}


def _highest(prices: Iterable[tuple[str | None, float]]) -> dict[str, float]:
    """Return the highest of several prices of a name: tiers fall, and reservations of capacity have a price of 0."""
    highest: dict[str, float] = {}
    for name, usd in prices:
        if name and usd > 0:
            highest[name] = max(usd, highest.get(name, 0.0))
    return highest


def _instance_type_of(document: Mapping[str, Any]) -> InstanceType:
    cards = document.get("GpuInfo", {}).get("Gpus", [])
    others = document.get("InferenceAcceleratorInfo", {}).get("Accelerators", [])
    card = (cards or others or [None])[0]
    network = document["NetworkInfo"].get("NetworkCards", [])
    disks = document.get("EbsInfo", {}).get("EbsOptimizedInfo", {})
    gbit_per_s = sum(part.get("BaselineBandwidthInGbps", 0.0) for part in network)
    return InstanceType(
        name=document["InstanceType"],
        vcpus=document["VCpuInfo"]["DefaultVCpus"],
        memory_bytes=document["MemoryInfo"]["SizeInMiB"] * BYTES_PER_MIB,
        accelerator_name=card["Name"].lower().replace(" ", "-") if card else None,
        accelerator_count=card.get("Count", 0) if card else 0,
        accelerator_memory_bytes_each=(
            card.get("MemoryInfo", {}).get("SizeInMiB", 0) * BYTES_PER_MIB if card else 0
        ),
        network_bandwidth_bytes_per_s=gbit_per_s * _MBIT_PER_GBIT * BYTES_PER_S_PER_MBIT_PER_S,
        disk_bandwidth_bytes_per_s=disks.get("BaselineThroughputInMBps", 0.0) * 1e6,
    )
