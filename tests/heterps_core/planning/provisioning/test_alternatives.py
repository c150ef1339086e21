import dataclasses
import math

import pytest

from heterps_core.hardware import InstanceOffer, InstanceType, Market
from heterps_core.planning.provisioning.offer_choice import MAX_ALTERNATIVES, _equal_offers, choose_instances
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from heterps_core.plans.scheduling_plan import Stage
from infra.prices.price_catalogue import PriceCatalogue

BUNDLED = PriceCatalogue().offers(region="us-east-1")


def card_offer(name: str, price_usd_per_hour: float, *, memory_gib: int = 16, **other) -> InstanceOffer:
    machine = InstanceType(
        name=name,
        vcpus=4,
        memory_bytes=memory_gib * 1024**3,
        accelerator_name="t4",
        accelerator_count=1,
        accelerator_memory_bytes_each=16 * 1024**3,
        network_bandwidth_bytes_per_s=5e9 / 8,
    )
    values = {"region": "us-east-1", "zone": "us-east-1a", "market": Market.SPOT, **other}
    return InstanceOffer(
        instance_type=machine,
        price_usd_per_hour=price_usd_per_hour,
        price_as_of="2026-07-20",
        price_source="test",
        **values,
    )


PLANNED = card_offer("g4dn.xlarge", 0.20)


def names(offers) -> list[str]:
    return [offer.instance_type.name for offer in offers]


def test_as_many_cards_with_more_around_them_stand_in_and_the_cheapest_comes_first():
    others = [
        card_offer("g4dn.4xlarge", 0.29, memory_gib=64),
        card_offer("g4dn.2xlarge", 0.24, memory_gib=32),
    ]

    assert names(_equal_offers(PLANNED, [PLANNED, *others], device_type="gpu-t4-spot", units=1)) == [
        "g4dn.2xlarge",
        "g4dn.4xlarge",
    ]


@pytest.mark.parametrize(
    "other",
    [
        card_offer("g4dn.2xlarge", 0.31),  # more than half as much again
        card_offer("g4dn.2xlarge", 0.20, zone="us-east-1b"),
        card_offer("g4dn.2xlarge", 0.20, market=Market.ON_DEMAND),
        card_offer("g4dn.2xlarge", 0.20, memory_gib=8),
        card_offer("g5.2xlarge", 0.20),  # another family
        card_offer("g4dn.2xlarge", 0.20, cloud="gcp"),
    ],
)
def test_what_is_dearer_elsewhere_or_less_does_not_stand_in(other):
    assert _equal_offers(PLANNED, [PLANNED, other], device_type="gpu-t4-spot", units=1) == ()


def test_no_more_stand_in_than_a_fleet_request_is_good_for():
    others = [card_offer(f"g4dn.{index}xlarge", 0.21) for index in range(30)]

    found = _equal_offers(PLANNED, others, device_type="gpu-t4-spot", units=1)

    assert len(found) == MAX_ALTERNATIVES


@pytest.mark.parametrize(
    ("device_type", "replicas", "planned", "alternatives"),
    [
        # By the price list: m7i has the cores of c7i for 13 % more, r7i for 48 % more.
        ("cpu-c7i", 4, "c7i.2xlarge", ["m7i.2xlarge", "r7i.2xlarge"]),
        ("cpu-r6in", 2, "r6in.xlarge", ["r6idn.xlarge"]),
        # The next sizes with one T4 cost 43 % and 129 % more.
        ("gpu-t4", 1, "g4dn.xlarge", ["g4dn.2xlarge"]),
    ],
)
def test_a_purchase_has_what_the_bundled_prices_know(device_type, replicas, planned, alternatives):
    [group] = choose_instances([Stage(0, 0, device_type, replicas)], BUNDLED).groups

    assert group.offer.instance_type.name == planned
    assert names(group.alternatives) == alternatives


def bought(max_usd_per_hour: float) -> ProvisioningPlan:
    plan = choose_instances([Stage(0, 0, "cpu-c7i", 4), Stage(1, 1, "gpu-t4", 1)], BUNDLED)
    return plan.within_price(max_usd_per_hour)


def test_alternatives_that_could_break_a_cap_are_left_out_the_costliest_first():
    # By hand: 0.357 + 0.526 = 0.883; m7i + 0.0462, r7i + 0.1722, g4dn.2xlarge + 0.226.
    assert [names(group.alternatives) for group in bought(math.inf).groups] == [
        ["m7i.2xlarge", "r7i.2xlarge"],
        ["g4dn.2xlarge"],
    ]
    assert [names(group.alternatives) for group in bought(1.2).groups] == [
        ["m7i.2xlarge", "r7i.2xlarge"],
        [],
    ]
    assert [names(group.alternatives) for group in bought(0.94).groups] == [["m7i.2xlarge"], []]
    assert [names(group.alternatives) for group in bought(0.90).groups] == [[], []]
    assert bought(0.1) == dataclasses.replace(
        bought(0.90)
    )  # another test has the cap that the plan itself breaks
