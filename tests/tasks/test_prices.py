import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from heterps_core.errors import ProvisioningError
from heterps_core.hardware import Market
from infra.prices.price_catalogue import BUNDLED_SNAPSHOT, write_refreshed
from infra.providers import provider_of
from infra.providers.aws.prices import AwsPrices
from infra.workspace import Workspace
from tasks import prices as prices_module
from tasks.prices import (
    _refresh_before_renting,
    catalogue_of,
    offers_now,
    refresh_prices_of,
)
from tasks.provisioning import find_offers
from tests.infra.builders import moto_ec2, offer, offer_named
from tests.infra.prices.aws_answers import (
    change,
    instance_type,
    product,
    stubbed_prices,
    will_give_products,
    will_give_rates,
    will_give_sizes,
    will_give_spot_prices,
)

REGION = "us-east-1"


@pytest.fixture
def workspace(tmp_path):
    return Workspace(root=tmp_path).create()


@pytest.fixture
def aws(monkeypatch):
    """Stubs that the tasks ask in place of AWS."""
    stubbed, pricing, ec2 = stubbed_prices(REGION)
    monkeypatch.setattr(AwsPrices, "with_own_clients", lambda: stubbed)
    monkeypatch.setattr(prices_module, "refresh_prices_of", refresh_prices_of.fn)
    return pricing, ec2[REGION]


def answer(aws, *, on_demand_usd="0.09"):
    pricing, ec2 = aws
    will_give_sizes(ec2, [instance_type("c7i.large", 2), instance_type("g4dn.xlarge", 4, gpu="T4")])
    will_give_products(
        pricing, [product("c7i.large", on_demand_usd), product("g4dn.xlarge", "0.5")], region=REGION
    )
    will_give_rates(pricing, REGION)
    changes = [change("g4dn.xlarge", "us-east-1a", "0.2", datetime.now(UTC) - timedelta(hours=3))]
    will_give_spot_prices(ec2, changes, names=["c7i.large", "g4dn.xlarge"])


def test_the_bundled_prices_stand_alone_until_a_refresh_ranks_above_them(workspace, aws):
    assert catalogue_of(workspace, "aws").files == (BUNDLED_SNAPSHOT,)
    answer(aws, on_demand_usd="0.07")

    refreshed, _ = refresh_prices_of.fn(workspace, AwsPrices, regions=[REGION])

    assert refreshed.num_new == 3
    catalogue = catalogue_of(workspace, "aws")
    assert offer_named("c7i.large", catalogue).price_usd_per_hour == 0.07
    found = find_offers.fn(["cpu-c7i", "gpu-t4-spot"], catalogue=catalogue)
    assert {(str(o.market), o.zone) for o in found} == {("on-demand", None), ("spot", "us-east-1a")}


def test_not_one_price_is_an_error_and_leaves_no_file(workspace, aws):
    pricing, ec2 = aws
    for stub, method in (
        (ec2, "describe_instance_types"),
        (pricing, "get_products"),
        (ec2, "describe_spot_price_history"),
    ):
        stub.add_client_error(method, "UnauthorizedOperation", "no")

    with pytest.raises(ProvisioningError, match=r"not one price could be refreshed.*stay in use"):
        refresh_prices_of.fn(workspace, AwsPrices, regions=[REGION])

    assert not workspace.price_folder.exists()


def test_before_renting_old_prices_are_refreshed_and_fresh_ones_are_not(workspace, aws):
    def newest_age_s():
        offers = catalogue_of(workspace, "aws").files[-1].offers()
        return min(offer.price_age(datetime.now(UTC)).total_seconds() for offer in offers)

    old = replace(offer(), price_as_of=(datetime.now(UTC) - timedelta(hours=2)).isoformat())
    write_refreshed(workspace.price_folder, [old], at=datetime.now(UTC) - timedelta(hours=2))
    answer(aws)

    _refresh_before_renting(workspace, "aws", regions=[REGION])
    assert newest_age_s() < 60
    _refresh_before_renting(workspace, "aws", regions=[REGION])  # would find no more answers

    assert len(list(workspace.price_folder.glob("prices_*"))) == 2


def test_before_renting_in_a_region_without_prices_they_are_asked_for(workspace, aws, monkeypatch):
    now = datetime.now(UTC)
    fresh = replace(offer(region="eu-west-1"), price_as_of=now.isoformat())
    write_refreshed(workspace.price_folder, [fresh], at=now)
    asked = []
    monkeypatch.setattr(prices_module, "refresh_prices_of", lambda *_, regions: asked.extend(regions))

    _refresh_before_renting(workspace, "aws", regions=["eu-west-1", REGION])

    assert asked == [REGION]


def test_before_renting_a_refresh_that_fails_is_reported_and_borne(workspace, monkeypatch, caplog):
    def refuse():
        raise ProvisioningError("no credentials")

    monkeypatch.setattr(AwsPrices, "with_own_clients", refuse)
    monkeypatch.setattr(prices_module, "refresh_prices_of", refresh_prices_of.fn)

    with caplog.at_level(logging.WARNING):
        _refresh_before_renting(workspace, "aws", regions=[REGION])

    assert "no credentials" in caplog.text


@pytest.mark.parametrize("num_subnets", [1, 2])
def test_spot_is_planned_in_the_zones_that_have_a_subnet_alone(workspace, monkeypatch, num_subnets):
    """The cheapest zones have none; of what is sold on-demand, which is of no zone, all stays."""
    now = datetime.now(UTC)
    monkeypatch.setattr(prices_module, "refresh_prices_of", lambda *_, **__: None)
    monkeypatch.setattr(prices_module, "find_offers", find_offers.fn)
    with moto_ec2() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        subnets = provider_of(workspace, "aws").client.describe_subnets()["Subnets"]
        *cheaper, first, second = sorted(subnets, key=lambda subnet: subnet["AvailabilityZone"])
        chosen = [first, second][:num_subnets]
        monkeypatch.setenv("HETERPS_AWS_SUBNETS", " ".join(each["SubnetId"] for each in chosen))
        sold = [
            replace(offer(market=market, price_usd_per_hour=usd), zone=zone, price_as_of=now.isoformat())
            for market, zone, usd in (
                (Market.ON_DEMAND, None, 0.09),
                *((Market.SPOT, each["AvailabilityZone"], 0.02) for each in cheaper),
                *((Market.SPOT, each["AvailabilityZone"], 0.04) for each in (first, second)),
            )
        ]
        write_refreshed(workspace.price_folder, sold, at=now)
        found, _ = offers_now(workspace, "aws", ["cpu-c7i-spot"], regions=[REGION])

    zones = {each.zone for each in found[REGION]}
    assert zones == {None, *(each["AvailabilityZone"] for each in chosen)}


def test_where_aws_does_not_tell_its_subnets_all_zones_are_planned_with(workspace, monkeypatch, caplog):
    now = datetime.now(UTC)
    monkeypatch.setattr(prices_module, "refresh_prices_of", lambda *_, **__: None)
    monkeypatch.setattr(prices_module, "find_offers", find_offers.fn)
    sold = replace(offer(market=Market.SPOT), zone="us-east-1a", price_as_of=now.isoformat())
    write_refreshed(workspace.price_folder, [sold, replace(sold, market=Market.ON_DEMAND, zone=None)], at=now)
    with moto_ec2() as environment:
        for name, value in {**environment, "HETERPS_AWS_SUBNETS": "subnet-none"}.items():
            monkeypatch.setenv(name, value)
        found, _ = offers_now(workspace, "aws", ["cpu-c7i-spot"], regions=[REGION])

    assert {each.zone for each in found[REGION]} == {None, "us-east-1a"}
    assert (
        "all zones are planned with: AWS refused to find a network: InvalidSubnetID.NotFound" in caplog.text
    )
