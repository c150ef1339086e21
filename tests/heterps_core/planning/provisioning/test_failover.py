import dataclasses

import pytest

from heterps_core.hardware import InstanceOffer, Market
from heterps_core.planning.provisioning.failover import launch_attempts
from heterps_core.plans.scheduling_plan import Stage
from tests.infra.builders import offer


def on_spot(zone: str, price_usd_per_hour: float) -> InstanceOffer:
    return dataclasses.replace(offer(price_usd_per_hour=price_usd_per_hour, market=Market.SPOT), zone=zone)


def places(stages, offers) -> list[tuple[str | None, set[str], float]]:
    plans = launch_attempts(stages, offers)
    return [
        (
            plan.groups[0].offer.zone,
            {str(group.offer.market) for group in plan.groups},
            plan.price_usd_per_hour,
        )
        for plan in plans
    ]


def test_spot_is_tried_zone_by_zone_and_then_on_demand_in_the_same_zones():
    spot = [on_spot("b", 0.02), on_spot("a", 0.03), on_spot("c", 0.04), on_spot("d", 0.05)]
    offers = [offer(price_usd_per_hour=0.09), *spot]
    stages = [Stage(0, 0, "cpu-c7i-spot", 2)]

    # By hand: one of the two machines keeps the rendezvous store and costs 0.09. The fourth zone is not tried.
    assert places(stages, offers) == [
        ("b", {"on-demand", "spot"}, pytest.approx(0.11)),
        ("a", {"on-demand", "spot"}, pytest.approx(0.12)),
        ("c", {"on-demand", "spot"}, pytest.approx(0.13)),
        ("b", {"on-demand"}, pytest.approx(0.18)),
        ("a", {"on-demand"}, pytest.approx(0.18)),
        ("c", {"on-demand"}, pytest.approx(0.18)),
    ]


def test_stages_keep_the_names_that_the_job_knows_them_by():
    plans = launch_attempts([Stage(0, 0, "cpu-c7i-spot", 1)], [offer(), on_spot("a", 0.02)])

    assert {group.device_type for plan in plans for group in plan.groups} == {"cpu-c7i-spot"}


def test_a_plan_on_demand_is_tried_in_its_zones_alone():
    zones = [
        dataclasses.replace(offer(price_usd_per_hour=usd), zone=z) for z, usd in (("a", 0.2), ("b", 0.1))
    ]

    assert places([Stage(0, 0, "cpu-c7i", 1)], zones) == [
        ("b", {"on-demand"}, 0.1),
        ("a", {"on-demand"}, 0.2),
    ]
    assert places([Stage(0, 0, "cpu-c7i", 1)], [offer()]) == [(None, {"on-demand"}, 0.09)]


def test_on_demand_prices_of_each_zone_are_used_where_they_differ():
    # Zone b is cheap on spot and sells nothing on-demand but the other size of another zone.
    offers = [
        dataclasses.replace(offer(price_usd_per_hour=0.2), zone="a"),
        dataclasses.replace(offer(price_usd_per_hour=0.3), zone="b"),
        on_spot("a", 0.05),
        on_spot("b", 0.02),
    ]

    tried = places([Stage(0, 0, "cpu-c7i-spot", 2)], offers)

    assert [(zone, price) for zone, markets, price in tried if markets == {"on-demand"}] == [
        ("a", pytest.approx(0.4)),
        ("b", pytest.approx(0.6)),
    ]
