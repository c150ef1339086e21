"""Current prices of AWS: on-demand from the Pricing API, spot from the spot price history, sizes from EC2.

Questions are functions that receive the boto3 client. All of them page, and none asks once per type: a region takes
some dozen calls. The clients retry with botocore's adaptive mode, which slows down where AWS throttles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config

from heterps_core.errors import UnknownNameError
from heterps_core.hardware import InstanceType
from heterps_core.units import BYTES_PER_MIB, BYTES_PER_S_PER_MBIT_PER_S
from infra.providers.aws.errors import explained
from infra.providers.aws.spot_history import SpotHistory, spot_histories

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_pricing import PricingClient

PRICING_REGION = "us-east-1"
"""The Pricing API answers in few regions, for all of them."""

RETRIES = Config(
    retries={"mode": "adaptive", "max_attempts": 8},
    connect_timeout=10,
    read_timeout=30,
    user_agent_extra="heterps",
)

PRODUCT_FILTERS = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}
"""What is bought when an instance is launched plainly; other products of the same type are other prices."""

PRICING_SOURCE = "AWS Pricing API, Linux, on-demand"

MBIT_PER_GBIT = 1_000


def check_regions(names: Sequence[str]) -> None:
    """Check that AWS has regions of these names, without asking it.

    Raises:
        UnknownNameError: boto3 knows of no such region.
    """
    known = boto3.session.Session().get_available_regions("ec2")
    for name in names:
        if name not in known:
            raise UnknownNameError("region of AWS", name, known)


class AwsPrices:
    """Asks AWS; each method is one kind of question.

    Args:
        pricing: Client of the Pricing API.
        ec2_of_region: Returns the EC2 client of a region.
    """

    def __init__(self, pricing: PricingClient, ec2_of_region: Callable[[str], EC2Client]) -> None:
        self.pricing = pricing
        self.ec2_of_region = ec2_of_region

    @classmethod
    def with_own_clients(cls) -> AwsPrices:
        """Return one with boto3's own search for credentials.

        Raises:
            ProvisioningError: boto3 cannot make a client.
        """
        with explained("prepare to ask for prices"):
            pricing = boto3.client("pricing", region_name=PRICING_REGION, config=RETRIES)
        return cls(pricing, lambda region: boto3.client("ec2", region_name=region, config=RETRIES))

    def on_demand(self, region: str, *, instance_type: str | None = None) -> dict[str, float]:
        """Return the USD per hour of each instance type of a region, or of one type alone.

        Raises:
            ProvisioningError: AWS does not answer, or refuses.
        """
        filters = {**PRODUCT_FILTERS, "regionCode": region}
        if instance_type is not None:
            filters["instanceType"] = instance_type
        with explained(f"give on-demand prices in {region}"):
            return on_demand_prices(self.pricing, filters)

    def spot(
        self, region: str, instance_types: Sequence[str], *, since: datetime
    ) -> dict[tuple[str, str], SpotHistory]:
        """Return the history of each instance type and zone.

        Raises:
            ProvisioningError: AWS does not answer, or refuses.
        """
        with explained(f"give spot prices in {region}"):
            return spot_histories(self.ec2_of_region(region), instance_types, since=since)

    def sizes(self, region: str, families: Iterable[str]) -> dict[str, InstanceType]:
        """Return what each instance type of some families is.

        Raises:
            ProvisioningError: AWS does not answer, or refuses.
        """
        with explained(f"list instance types in {region}"):
            return instance_types(self.ec2_of_region(region), families)


def on_demand_prices(client: PricingClient, filters: Mapping[str, str]) -> dict[str, float]:
    """Return instance type -> USD per hour for the products that match; of several prices the highest.

    A product without a price per hour above 0 is left out: reservations of capacity have one of 0.
    """
    pages = client.get_paginator("get_products").paginate(
        ServiceCode="AmazonEC2",
        FormatVersion="aws_v1",
        Filters=[{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in filters.items()],
    )
    prices: dict[str, float] = {}
    for page in pages:
        for text in page["PriceList"]:
            product: dict[str, Any] = json.loads(text)
            name = product["product"]["attributes"].get("instanceType")
            usd = max(_usd_per_hour(product), default=0.0)
            if name and usd > 0:
                prices[name] = max(usd, prices.get(name, 0.0))
    return prices


def instance_types(client: EC2Client, families: Iterable[str]) -> dict[str, InstanceType]:
    """Return name -> instance type for all sizes of some families."""
    pages = client.get_paginator("describe_instance_types").paginate(
        Filters=[{"Name": "instance-type", "Values": [f"{family}.*" for family in sorted(families)]}]
    )
    return {
        document["InstanceType"]: _instance_type_of(document)
        for page in pages
        for document in page["InstanceTypes"]
    }


def _usd_per_hour(product: Mapping[str, Any]) -> Iterable[float]:
    for term in product["terms"].get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            if dimension["unit"] == "Hrs" and "USD" in dimension["pricePerUnit"]:
                yield float(dimension["pricePerUnit"]["USD"])


def _instance_type_of(document: Mapping[str, Any]) -> InstanceType:
    cards = document.get("GpuInfo", {}).get("Gpus", [])
    others = document.get("InferenceAcceleratorInfo", {}).get("Accelerators", [])
    card = (cards or others or [None])[0]
    network = document["NetworkInfo"].get("NetworkCards", [])
    gbit_per_s = sum(part.get("BaselineBandwidthInGbps", 0.0) for part in network)
    return InstanceType(
        name=document["InstanceType"],
        vcpus=document["VCpuInfo"]["DefaultVCpus"],
        memory_bytes=document["MemoryInfo"]["SizeInMiB"] * BYTES_PER_MIB,
        accelerator_name=card["Name"].lower() if card else None,
        accelerator_count=card.get("Count", 0) if card else 0,
        accelerator_memory_bytes_each=(
            card.get("MemoryInfo", {}).get("SizeInMiB", 0) * BYTES_PER_MIB if card else 0
        ),
        network_bandwidth_bytes_per_s=gbit_per_s * MBIT_PER_GBIT * BYTES_PER_S_PER_MBIT_PER_S,
    )
