"""Answers of AWS as its API references show them, for botocore's Stubber: written by hand, with two pages each."""

import json
from datetime import UTC, datetime
from typing import Any

import boto3
from botocore.stub import ANY, Stubber

from infra.prices.service_charges import ServiceRate
from infra.providers.aws.prices import AwsPrices

NOW = datetime(2026, 11, 21, 4, 0, tzinfo=UTC)


def stubbed_prices(*regions: str) -> tuple[AwsPrices, Stubber, dict[str, Stubber]]:
    """Return one that asks stubs: of the Pricing API, and of EC2 in each region."""
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    pricing = boto3.client("pricing", region_name="us-east-1", **keys)
    clients = {region: boto3.client("ec2", region_name=region, **keys) for region in regions}
    stubs = {region: Stubber(client) for region, client in clients.items()}
    pricing_stub = Stubber(pricing)
    for stub in (pricing_stub, *stubs.values()):
        stub.activate()
    return AwsPrices(pricing, clients.__getitem__), pricing_stub, stubs


def product(name: str, usd: str, *, unit: str = "Hrs") -> str:
    """Return one entry of PriceList."""
    sku = f"SKU{name}{usd}"
    return json.dumps(
        {
            "product": {
                "productFamily": "Compute Instance",
                "attributes": {"instanceType": name, "regionCode": "us-east-1", "operatingSystem": "Linux"},
                "sku": sku,
            },
            "serviceCode": "AmazonEC2",
            "terms": {
                "OnDemand": {
                    f"{sku}.JRTCKXETXF": {
                        "priceDimensions": {
                            f"{sku}.JRTCKXETXF.6YS6EN2CT7": {
                                "unit": unit,
                                "beginRange": "0",
                                "endRange": "Inf",
                                "pricePerUnit": {"USD": usd},
                            }
                        },
                        "effectiveDate": "2026-11-01T00:00:00Z",
                        "offerTermCode": "JRTCKXETXF",
                    }
                }
            },
            "version": "20261120000000",
            "publicationDate": "2026-11-20T00:00:00Z",
        }
    )


def will_give_products(stub: Stubber, *pages: list[str], region: str, name: str | None = None) -> None:
    values = {
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "marketoption": "OnDemand",
        "regionCode": region,
        **({"instanceType": name} if name else {}),
    }
    asked = {
        "ServiceCode": "AmazonEC2",
        "FormatVersion": "aws_v1",
        "Filters": [{"Type": "TERM_MATCH", "Field": f, "Value": v} for f, v in values.items()],
    }
    _will_give(stub, "get_products", "PriceList", pages, asked)


def service(usd: str, unit: str, **attributes: str) -> str:
    """Return an entry of PriceList for a disk, a request, or traffic."""
    document = json.loads(product("none", usd, unit=unit))
    document["product"]["attributes"] = attributes
    return json.dumps(document)


RATES = {
    name: ServiceRate(unit, usd, "AWS Pricing API", "2026-11-21")
    for name, unit, usd in (
        ("disks", "GB-month", 0.088),
        ("disk operations", "IOPS-month", 0.0055),
        # 46.08 USD for a GiB/s.
        ("disk throughput", "MiB/s-month", 0.045),
        ("traffic to us-east-1", "GB", 0.02),
    )
}
"""Of the answers of `will_give_rates`; the other services are without one."""


def will_give_rates(stub: Stubber, region: str) -> None:
    """Answer the questions for rates of services, in their order: only disks and traffic have prices."""
    gp3 = [service("0.088", "GB-Mo"), service("0.0055", "IOPS-Mo"), service("46.08", "GiBps-mo")]
    away = [
        service("0.02", "GB", toRegionCode="us-east-1"),
        service("0.01", "GB", toRegionCode="us-east-1"),
    ]
    no_products: list[str] = []
    answers = [
        *[("AmazonEC2", gp3)] * 3,
        ("AmazonVPC", no_products),
        *[("AmazonS3", no_products)] * 3,
        ("AWSDataTransfer", no_products),
        ("AWSDataTransfer", away),
    ]
    for code, found in answers:
        asked = {"ServiceCode": code, "FormatVersion": "aws_v1", "Filters": ANY}
        stub.add_response("get_products", {"PriceList": found}, asked)


def instance_type(
    name: str, vcpus: int, *, gpu: str | None = None, gbit_per_s: float = 5.0
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "InstanceType": name,
        "VCpuInfo": {"DefaultVCpus": vcpus},
        "MemoryInfo": {"SizeInMiB": 4096 * vcpus},
        "EbsInfo": {"EbsOptimizedInfo": {"BaselineThroughputInMBps": 81.25}},
        "NetworkInfo": {"NetworkCards": [{"NetworkCardIndex": 0, "BaselineBandwidthInGbps": gbit_per_s}]},
    }
    if gpu:
        card = {"Name": gpu, "Manufacturer": "NVIDIA", "Count": 1, "MemoryInfo": {"SizeInMiB": 16384}}
        document["GpuInfo"] = {"Gpus": [card], "TotalGpuMemoryInMiB": 16384}
    return document


def will_give_sizes(stub: Stubber, *pages: list[dict[str, Any]]) -> None:
    _will_give(stub, "describe_instance_types", "InstanceTypes", pages, {"Filters": ANY})


def change(name: str, zone: str, price: str, at: datetime) -> dict[str, Any]:
    return {
        "InstanceType": name,
        "AvailabilityZone": zone,
        "SpotPrice": price,
        "Timestamp": at,
        "ProductDescription": "Linux/UNIX",
    }


def will_give_spot_prices(stub: Stubber, *pages: list[dict[str, Any]], names: list[str]) -> None:
    asked = {"InstanceTypes": names, "ProductDescriptions": ["Linux/UNIX"], "StartTime": ANY}
    _will_give(stub, "describe_spot_price_history", "SpotPriceHistory", pages, asked)


def _will_give(
    stub: Stubber, method: str, key: str, pages: tuple[list[Any], ...], asked: dict[str, Any]
) -> None:
    for number, page in enumerate(pages):
        is_last = number == len(pages) - 1
        token = {"NextToken": f"page {number}"} if number else {}
        stub.add_response(
            method,
            {key: page, **({} if is_last else {"NextToken": f"page {number + 1}"})},
            {**asked, **token},
        )
