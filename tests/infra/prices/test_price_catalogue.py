import csv
import gzip
import logging
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from heterps_core.device_types import DEVICE_TYPES
from heterps_core.errors import ConfigurationError, ProvisioningError, UnknownNameError
from heterps_core.hardware import Market
from heterps_core.planning.provisioning.offer_choice import unit_prices
from infra.prices.price_catalogue import (
    PriceCatalogue,
    PriceFile,
    age_text,
    warn_of_old_prices,
)
from tests.infra.builders import PRICE_SOURCE, offer, offer_named


@pytest.fixture(scope="module")
def catalogue():
    return PriceCatalogue()


def test_has_every_row_of_its_source_that_has_a_price_and_a_size(catalogue):
    with gzip.open(PRICE_SOURCE, "rt") as file:
        rows = [r for r in csv.DictReader(file) if r["ondemand_usd_per_hour"] and r["vcpus"]]

    offers = catalogue.offers(region="us-east-1")

    assert len(rows) == 1345
    assert {offer.instance_type.name for offer in offers} == {row["instance_type"] for row in rows}
    source = {row["instance_type"]: row for row in rows}
    for found in offers:
        row, machine = source[found.instance_type.name], found.instance_type
        assert found.price_usd_per_hour == float(row["ondemand_usd_per_hour"])
        assert (machine.vcpus, machine.memory_bytes) == (int(row["vcpus"]), int(row["memory_mib"]) * 2**20)
        assert machine.network_bandwidth_bytes_per_s == float(row["network_bandwidth_mbps"] or 0) * 1e6 / 8


def test_offer_carries_sizes_in_bytes_and_the_date_of_its_price(catalogue):
    offer = offer_named("g4dn.12xlarge", catalogue)

    assert offer.price_usd_per_hour == 3.912
    assert offer.instance_type.accelerator_name == "t4"
    assert offer.instance_type.accelerator_count == 4
    assert offer.instance_type.accelerator_memory_bytes_each == 16 * 1024**3
    assert offer.instance_type.network_bandwidth_bytes_per_s == 50e9 / 8
    assert offer.instance_type.disk_bandwidth_bytes_per_s == 9.5e9 / 8
    assert offer.instance_type.memory_bytes == 192 * 1024**3  # of the host
    assert offer.price_as_of.startswith("2026-07-20")
    assert "karpenter" in offer.price_source


def test_prices_a_unit_of_every_device_type_that_has_sizes(catalogue):
    prices = unit_prices(catalogue.offers(region="us-east-1"))

    assert prices["gpu-t4"] == 0.526  # g4dn.xlarge
    assert prices["cpu-c7i"] == pytest.approx(0.08925)  # c7i.large
    assert prices.keys() == DEVICE_TYPES.keys()


def test_a_fraction_of_a_card_is_no_accelerator(catalogue):
    assert offer_named("g6f.large", catalogue).instance_type.accelerator_count == 0


def test_names_the_regions_that_have_prices(catalogue):
    with pytest.raises(
        UnknownNameError, match=r"'eu-west-1' is not a known region with prices; .* us-east-1"
    ):
        catalogue.offers(region="eu-west-1")


def test_says_that_the_snapshot_has_no_spot_prices(catalogue):
    with pytest.raises(
        ProvisioningError, match=r"no price file has spot prices for us-east-1.*refresh-prices"
    ):
        catalogue.offers(region="us-east-1", market=Market.SPOT)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"no gzip", "cannot be read"),
        (gzip.compress(b"a,b\n1,2\n", mtime=0), "line 2"),
        (gzip.compress(b"name,vcpus,price_usd_per_hour\nc7i.large,2,cheap\n", mtime=0), "line 2"),
    ],
)
def test_a_damaged_snapshot_is_named_with_its_line(tmp_path, content, complaint):
    path = tmp_path / "prices.csv.gz"
    path.write_bytes(content)

    with pytest.raises(ConfigurationError, match=complaint):
        PriceCatalogue([PriceFile(path=path)])


NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("times", "text"),
    [
        (["2026-11-21T11:30:00+00:00"], "prices less than an hour old"),
        (["2026-11-21T07:00:00+00:00"], "prices 5 hours old"),
        (["2026-11-20T08:00:00+00:00"], "prices 28 hours old"),
        (["2026-07-20", "2026-11-21T07:00:00+00:00"], "prices 5 hours to 124 days old"),
    ],
)
def test_age_is_reported_in_words(times, text):
    assert age_text([replace(offer(), price_as_of=time) for time in times], now=NOW) == text


def test_a_price_older_than_a_week_is_warned_of_with_the_way_out(caplog):
    fresh, old = (replace(offer(), price_as_of=time) for time in ("2026-11-15", "2026-11-13"))

    with caplog.at_level(logging.WARNING):
        warn_of_old_prices([fresh], now=NOW)
        assert caplog.text == ""
        warn_of_old_prices([fresh, old], now=NOW)

    assert "c7i.large is 8 days old" in caplog.text
    assert "heterps refresh-prices" in caplog.text
