from dataclasses import replace
from datetime import timedelta

import pytest

from heterps_core.hardware import Market
from infra.prices.live_prices import Recheck, recheck
from tests.infra.builders import offer, plan
from tests.infra.prices.aws_answers import (
    NOW,
    change,
    product,
    stubbed_prices,
    will_give_products,
    will_give_spot_prices,
)

REGION = "us-east-1"
ON_DEMAND = offer("c7i.large", price_usd_per_hour=0.09)
ON_SPOT = replace(offer("c7i.large", price_usd_per_hour=0.03, market=Market.SPOT), zone="us-east-1a")


def test_what_is_frozen_is_the_price_of_now_with_its_time_and_source():
    prices, pricing, ec2 = stubbed_prices(REGION)
    will_give_products(pricing, [product("c7i.large", "0.09")], region=REGION, name="c7i.large")
    changes = [change("c7i.large", "us-east-1a", "0.04", NOW - timedelta(hours=3))]
    will_give_spot_prices(ec2[REGION], changes, names=["c7i.large"])

    result = recheck(prices, [ON_DEMAND, ON_SPOT], now=NOW)
    checked = result.applied_to(plan(ON_DEMAND, ON_SPOT))

    assert [group.offer.price_usd_per_hour for group in checked.groups] == [0.09, 0.04]
    assert {group.offer.price_as_of for group in checked.groups} == {"2026-11-21T04:00:00+00:00"}
    assert [group.offer.price_source for group in checked.groups] == [
        "AWS Pricing API, Linux, on-demand",
        "EC2 DescribeSpotPriceHistory, Linux/UNIX",
    ]
    assert result.moves == ("c7i.large in us-east-1a, spot: 0.0300 -> 0.0400 USD/hour (+33%)",)


def test_alternatives_are_checked_too_and_come_in_the_order_of_now():
    prices, pricing, _ = stubbed_prices(REGION)
    names = {"c7i.large": "0.09", "m7i.large": "0.14", "r7i.large": "0.12"}
    for name, usd in names.items():
        will_give_products(pricing, [product(name, usd)], region=REGION, name=name)
    planned = plan(ON_DEMAND)
    alternatives = (offer("m7i.large", price_usd_per_hour=0.10), offer("r7i.large", price_usd_per_hour=0.13))
    planned = replace(planned, groups=(replace(planned.groups[0], alternatives=alternatives),))

    [group] = recheck(prices, planned.offers, now=NOW).applied_to(planned).groups

    assert [(o.instance_type.name, o.price_usd_per_hour) for o in group.alternatives] == [
        ("r7i.large", 0.12),
        ("m7i.large", 0.14),
    ]


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_price_that_is_not_answered_stays_as_planned_and_is_reported(is_refused):
    prices, pricing, ec2 = stubbed_prices(REGION)
    if is_refused:
        pricing.add_client_error("get_products", "UnauthorizedOperation", "no")
        ec2[REGION].add_client_error("describe_spot_price_history", "RequestLimitExceeded", "slow down")
    else:
        will_give_products(pricing, [], region=REGION, name="c7i.large")
        will_give_spot_prices(ec2[REGION], [], names=["c7i.large"])

    result = recheck(prices, [ON_DEMAND, ON_SPOT], now=NOW)

    assert result.applied_to(plan(ON_DEMAND, ON_SPOT)) == plan(ON_DEMAND, ON_SPOT)
    assert result.moves == ()
    assert len(result.problems) == 2


@pytest.mark.parametrize(
    ("old", "new", "share"), [(0.0, 0.04, "+100%"), (0.04, 0.0, "-100%"), (0.0, 0.0, None)]
)
def test_a_price_of_nothing_moves_where_it_is_one_no_longer(old, new, share):
    before, now = offer(price_usd_per_hour=old), offer(price_usd_per_hour=new)

    moves = Recheck(offers={before: now}, problems=()).moves

    assert [move.rpartition("(")[2].rstrip(")") for move in moves] == ([share] if share else [])
