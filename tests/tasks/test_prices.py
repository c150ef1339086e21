import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from heterps_core.errors import BudgetExceededError, ProvisioningError
from heterps_core.plans.scheduling_plan import Stage
from infra.billing.caps import Caps
from infra.prices.price_catalogue import BUNDLED_SNAPSHOT, write_refreshed
from infra.providers.aws.prices import AwsPrices
from infra.workspace import Workspace
from tasks import prices as prices_module
from tasks.prices import (
    _refresh_before_renting,
    catalogue_of,
    recheck_prices,
    refresh_prices_of,
)
from tasks.provisioning import Provisioning, find_offers
from tests.infra.builders import offer, offer_named, plan
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

    old = replace(offer(), price_as_of=(datetime.now(UTC) - timedelta(hours=7)).isoformat())
    write_refreshed(workspace.price_folder, [old], at=datetime.now(UTC) - timedelta(hours=7))
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


SERVICES_USD_PER_HOUR = 40 * 0.08 / 730 + 0.005 + 0.001848
"""Of a machine, by hand: its disk, its address, and what it asks of the bucket."""


def bought(*, usd_per_hour=0.08, hours=10.0) -> Provisioning:
    purchase = plan(offer("c7i.large", price_usd_per_hour=usd_per_hour))
    return Provisioning(
        cloud_plan=purchase,
        launch_plan=purchase,
        launch_stages=(Stage(0, 0, "cpu-c7i", 1),),
        predicted_cost_usd=hours * (usd_per_hour + SERVICES_USD_PER_HOUR),
        is_dry_run=False,
        price_files=(BUNDLED_SNAPSHOT.path,),
        fallback_plans=(purchase,),
    )


def test_right_before_the_launch_prices_and_cost_are_those_of_now(aws, caplog):
    will_give_products(aws[0], [product("c7i.large", "0.10")], region=REGION, name="c7i.large")

    with caplog.at_level(logging.WARNING):
        checked = recheck_prices.fn(bought(), provider="aws", caps=Caps())

    assert checked.launch_plan.price_usd_per_hour == checked.cloud_plan.price_usd_per_hour == 0.10
    assert checked.fallback_plans[0].price_usd_per_hour == 0.10
    assert checked.predicted_cost_usd == pytest.approx(10 * (0.10 + SERVICES_USD_PER_HOUR))
    assert "0.0800 -> 0.1000 USD/hour (+25%)" in caplog.text
    assert "less than an hour old" in checked.summary


def test_a_price_that_has_risen_beyond_a_cap_is_refused_before_anything_is_launched(aws):
    will_give_products(aws[0], [product("c7i.large", "0.10")], region=REGION, name="c7i.large")

    with pytest.raises(BudgetExceededError, match="nothing was launched"):
        recheck_prices.fn(bought(), provider="aws", caps=Caps(max_usd_per_hour=0.09))


def test_disks_and_addresses_stay_as_they_were_and_count_against_the_caps(aws):
    for _ in range(2):
        will_give_products(aws[0], [product("c7i.large", "0.10")], region=REGION, name="c7i.large")
    planned = bought(hours=10.0)

    # By hand: ten hours at 0.08 USD become ten at 0.10, with the same for disk and address.
    checked = recheck_prices.fn(planned, provider="aws", caps=Caps())
    assert checked.predicted_cost_usd == pytest.approx(10 * (0.10 + SERVICES_USD_PER_HOUR))
    with pytest.raises(BudgetExceededError, match="USD per hour"):
        recheck_prices.fn(planned, provider="aws", caps=Caps(max_usd_per_hour=0.105))


def test_an_alternative_or_a_fall_back_whose_price_of_now_breaks_a_cap_is_left_out(aws):
    planned = bought()
    [group] = planned.launch_plan.groups
    costlier = offer("m7i.large", price_usd_per_hour=0.085)
    purchase = replace(planned.launch_plan, groups=(replace(group, alternatives=(costlier,)),))
    fallback = plan(costlier)
    planned = replace(planned, cloud_plan=purchase, launch_plan=purchase, fallback_plans=(fallback, purchase))
    for name, usd in (("c7i.large", "0.08"), ("m7i.large", "0.31")):
        will_give_products(aws[0], [product(name, usd)], region=REGION, name=name)

    # By hand: what was 0.085 USD/hour as planned is 0.31 now.
    checked = recheck_prices.fn(planned, provider="aws", caps=Caps(max_usd_per_hour=0.14))

    assert [offer.instance_type.name for offer in checked.launch_plan.offers] == ["c7i.large"]
    assert [p.price_usd_per_hour for p in checked.fallback_plans] == [0.08]
    assert checked.fallback_plans[0].offers == checked.launch_plan.offers


def test_prices_that_cannot_be_checked_again_stay_and_are_reported(monkeypatch, caplog):
    def refuse():
        raise ProvisioningError("no credentials")

    monkeypatch.setattr(AwsPrices, "with_own_clients", refuse)

    with caplog.at_level(logging.WARNING):
        assert recheck_prices.fn(bought(), provider="aws", caps=Caps()) == bought()

    assert "stays as planned: no credentials" in caplog.text
