import gzip
from pathlib import Path

import pytest

from heterps_core.device_types import DEVICE_TYPES
from heterps_core.errors import ConfigurationError
from heterps_core.hardware import Market
from infra.prices.price_catalogue import PriceCatalogue
from infra.prices.skypilot_catalogue import SkyPilotCatalogue
from tests.paths import PROJECT

PRICES = PROJECT.parent / "shared" / "data" / "prices"

GCP = """\
InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,SpotPrice
g2-standard-4,4.0,16.0,,,,us-central1,us-central1-a,0.2,0.1
g2-standard-4,4.0,16.0,,,,us-central1,us-central1-b,0.2,0.1
n1-standard-4,4.0,15.0,,,,us-central1,us-central1-a,0.19,0.07
a4-highgpu-8g,224.0,3968.0,,,,us-central1,us-central1-a,0.0,0.0
,,,L4,1,{'Gpus': [{'MemoryInfo': {'SizeInMiB': 24576}}]},us-central1,us-central1-a,0.56,
,,,T4,1,{'Gpus': [{'MemoryInfo': {'SizeInMiB': 16384}}]},us-central1,us-central1-a,0.35,0.16
,,,tpu-v3-8,1,tpu-v3-8,us-central1,us-central1-a,8.0,2.0
"""
# Another order of columns, as the files of other clouds have it.
VAST = """\
Region,Price,SpotPrice,InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo
", CA, NA",0.93,0.00,2x-RTX,RTX5090,2,32,64.0,"{'Gpus': [{'Name': 'RTX5090', 'Count': 2, 'MemoryInfo': \
{'SizeInMiB': 65214}}], 'TotalGpuMemoryInMiB': 65214}"
", CA, NA",0.90,0.00,2x-RTX,RTX5090,2,32,64.0,
"""


def written(folder: Path, name: str, text: str) -> SkyPilotCatalogue:
    (folder / name).write_bytes(gzip.compress(text.encode()))
    return SkyPilotCatalogue.at(folder / name)


def test_googles_cards_are_sold_with_their_hosts_at_both_prices(tmp_path):
    offers = list(written(tmp_path, "gcp_vms_2026-05-20.csv.gz", GCP).offers())

    # By hand: L4 has no spot price; zone b sells no L4 and nobody sells the host alone; 0.0 is no price; no TPUs.
    assert {(o.instance_type.name, o.zone, str(o.market)): o.price_usd_per_hour for o in offers} == {
        ("n1-standard-4", "us-central1-a", "on-demand"): 0.19,
        ("n1-standard-4", "us-central1-a", "spot"): 0.07,
        ("g2-standard-4", "us-central1-a", "on-demand"): pytest.approx(0.76),
        ("n1-standard-4+1xT4", "us-central1-a", "on-demand"): pytest.approx(0.54),
        ("n1-standard-4+1xT4", "us-central1-a", "spot"): pytest.approx(0.23),
    }
    card = next(offer for offer in offers if offer.instance_type.name == "g2-standard-4").instance_type
    assert (card.accelerator_name, card.accelerator_count) == ("l4", 1)
    assert card.accelerator_memory_bytes_each == 24 * 1024**3
    assert DEVICE_TYPES["gpu-l4"].units_of(card) == 1


def test_a_price_says_whose_it_is_of_when_and_what_interruptions_are_assumed(tmp_path):
    offers = list(written(tmp_path, "gcp_vms_2026-05-20.csv.gz", GCP).offers())

    assert {(offer.cloud, offer.price_as_of) for offer in offers} == {("gcp", "2026-05-20")}
    assert all("gcp_vms_2026-05-20.csv.gz" in offer.price_source for offer in offers)
    assert all((offer.interruptions_per_hour > 0) == (offer.market is Market.SPOT) for offer in offers)


def test_columns_are_found_by_name_and_0_is_no_spot_price(tmp_path):
    [offer] = written(tmp_path, "vast_vms_2026-05-20.csv.gz", VAST).offers()

    assert (offer.region, offer.zone, offer.market) == ("CA, NA", None, Market.ON_DEMAND)
    assert offer.price_usd_per_hour == 0.90  # the lower one of two for the same thing


def test_the_memory_of_all_cards_together_is_shared_out(tmp_path):
    first_row_alone = "\n".join(VAST.splitlines()[:2])

    [offer] = written(tmp_path, "vast_2026-05-20.csv.gz", first_row_alone).offers()

    assert offer.instance_type.accelerator_memory_bytes_each == 32_607 * 1024**2


def test_cloud_and_date_come_from_the_path_or_are_asked_for(tmp_path):
    (tmp_path / "azure").mkdir()
    path = tmp_path / "azure" / "vms.csv"

    assert SkyPilotCatalogue.at(path, as_of="2026-05-20").cloud == "azure"
    with pytest.raises(ConfigurationError, match="does not say the date"):
        SkyPilotCatalogue.at(path)
    with pytest.raises(ConfigurationError, match="does not say the cloud"):
        SkyPilotCatalogue.at(tmp_path / "prices_2026-05-20.csv")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [(GCP.replace("0.19", "cheap"), "line 4"), (GCP.replace("Price", "Cost"), "line 2")],
)
def test_a_damaged_row_is_named(tmp_path, text, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        list(written(tmp_path, "gcp_vms_2026-05-20.csv.gz", text).offers())


@pytest.mark.skipif(not PRICES.exists(), reason="the recorded catalogues are not on this machine")
def test_a_whole_catalogue_of_google_has_the_published_prices():
    catalogue = PriceCatalogue([SkyPilotCatalogue.at(PRICES / "gcp_vms_2026-05-20.csv.gz")])

    prices = {
        offer.instance_type.name: offer.price_usd_per_hour
        for offer in catalogue.offers(region="us-central1", cloud="gcp")
        if offer.zone == "us-central1-a"
    }

    # Google's price list of one zone: host and card together.
    assert prices["g2-standard-4"] == pytest.approx(0.70683, abs=1e-5)
    assert prices["a2-highgpu-1g"] == pytest.approx(3.67339, abs=1e-5)
    assert len(catalogue.regions("gcp")) == 44
    assert all(price > 0 for price in prices.values())


@pytest.mark.skipif(not PRICES.exists(), reason="the recorded catalogues are not on this machine")
@pytest.mark.parametrize(("cloud", "num_offers", "has_spot"), [("lambda", 425, False), ("vast", 64, False)])
def test_clouds_without_spot_prices_have_none(cloud, num_offers, has_spot):
    offers = list(SkyPilotCatalogue.at(PRICES / f"{cloud}_vms_2026-05-20.csv.gz").offers())

    assert len(offers) == num_offers
    assert any(offer.market is Market.SPOT for offer in offers) == has_spot
