"""Small plans, offers and a moto server for the tests of machines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import boto3

from heterps_core import device_types
from heterps_core.hardware import InstanceOffer, InstanceType, Market
from heterps_core.plans.provisioning_plan import InstanceGroup, ProvisioningPlan, TableDisk
from infra.bootstrap.node_start import Bootstrap
from infra.prices.price_catalogue import PriceCatalogue
from tests.moto_server import REGION, empty_cloud

PRICE_SOURCE = Path(device_types.__file__).parent / "published" / "instance_types_2026-07-20.csv.gz"
"""The published figures that the bundled prices were made from."""

SLEEP = ("-c", "import time; time.sleep(100)")
"""A node that does nothing for longer than any test lasts."""


def offer(
    name: str = "c7i.large",
    *,
    price_usd_per_hour: float = 0.09,
    region: str = REGION,
    market: Market = Market.ON_DEMAND,
) -> InstanceOffer:
    machine = InstanceType(
        name=name,
        vcpus=2,
        memory_bytes=4 * 1024**3,
        accelerator_name=None,
        accelerator_count=0,
        accelerator_memory_bytes_each=0,
        network_bandwidth_bytes_per_s=1e11,
    )
    return InstanceOffer(
        instance_type=machine,
        region=region,
        zone=None,
        market=market,
        price_usd_per_hour=price_usd_per_hour,
        price_as_of="2026-07-20",
        price_source="test",
    )


def offer_named(name: str, catalogue: PriceCatalogue) -> InstanceOffer:
    """The one on-demand offer of an instance type."""
    [found] = [each for each in catalogue.offers(region=REGION) if each.instance_type.name == name]
    return found


def plan(*stages: InstanceOffer) -> ProvisioningPlan:
    """One replica on one instance per stage."""
    offers = stages or (offer(), offer("c7i.xlarge", price_usd_per_hour=0.17))
    groups = tuple(
        InstanceGroup(stage=i, device_type="cpu-c7i", offer=o, count=1, units_per_instance=1)
        for i, o in enumerate(offers)
    )
    return ProvisioningPlan(
        replicas=(1,) * len(offers),
        groups=groups,
        planned_price_usd_per_hour=sum(o.price_usd_per_hour for o in offers),
    )


def with_disks(bought: ProvisioningPlan, *disks: TableDisk | None) -> ProvisioningPlan:
    """Room for rows of tables on the machines of each stage."""
    groups = (replace(group, table_disk=disk) for group, disk in zip(bought.groups, disks, strict=True))
    return replace(bought, groups=tuple(groups))


def bootstrap(
    run_directory: Path,
    arguments: tuple[str, ...] = SLEEP,
    *,
    lifetime_s: int = 100,
    python: str = sys.executable,
) -> Bootstrap:
    return Bootstrap(
        run_location=str(run_directory), python=python, arguments=arguments, lifetime_s=lifetime_s
    )


@contextmanager
def moto_ec2() -> Iterator[dict[str, str]]:
    """Serve EC2 on a loopback port, with an own image; yields the environment that leads boto3 there."""
    with empty_cloud() as environment:
        client = boto3.client(
            "ec2",
            endpoint_url=environment["AWS_ENDPOINT_URL"],
            region_name=REGION,
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        client.register_image(Name="heterps-node-1", Architecture="x86_64", RootDeviceName="/dev/sda1")
        yield environment
