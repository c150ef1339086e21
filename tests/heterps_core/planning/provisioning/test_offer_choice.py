import dataclasses
import itertools
import random

import pytest

from heterps_core.errors import ProvisioningError, UnknownNameError
from heterps_core.hardware import InstanceOffer, InstanceType, Market
from heterps_core.planning.cost_model.instance_cover import InstanceCover
from heterps_core.planning.provisioning.offer_choice import (
    _cheapest_cover,
    _CoverOption,
    choose_instances,
    instance_sizes,
    instances_by_zone,
    interruptions_per_unit,
    offers_that_hold_workers,
    unit_prices,
)
from heterps_core.plans.scheduling_plan import Stage


def cpu_offer(name: str, *, vcpus: int, price_usd_per_hour: float) -> InstanceOffer:
    machine = InstanceType(
        name=name,
        vcpus=vcpus,
        memory_bytes=8 * 1024**3,
        accelerator_name=None,
        accelerator_count=0,
        accelerator_memory_bytes_each=0,
        network_bandwidth_bytes_per_s=1e11,
    )
    return InstanceOffer(
        instance_type=machine,
        region="us-east-1",
        zone=None,
        market=Market.ON_DEMAND,
        price_usd_per_hour=price_usd_per_hour,
        price_as_of="2026-07-20",
        price_source="test",
    )


def brute_force_price(num_units: int, options: list[_CoverOption]) -> float:
    """Least price over all count vectors, in whole cents so that sums are exact."""
    ranges = [range(-(-num_units // option.units) + 1) for option in options]
    return min(
        sum(round(c * o.offer.price_usd_per_hour * 100) for c, o in zip(counts, options, strict=True))
        for counts in itertools.product(*ranges)
        if sum(c * o.units for c, o in zip(counts, options, strict=True)) >= num_units
    )


def test_cover_equals_brute_force_on_random_sizes_and_prices():
    generator = random.Random(20)
    for _ in range(60):
        options = [
            _CoverOption(
                offer=cpu_offer(f"c7i.{i}", vcpus=2, price_usd_per_hour=generator.randint(1, 400) / 100),
                units=generator.randint(1, 6),
            )
            for i in range(generator.randint(1, 3))
        ]
        num_units = generator.randint(1, 14)

        cover = _cheapest_cover(num_units, options)

        assert sum(option.units * count for option, count in cover) >= num_units
        cents = sum(round(count * option.offer.price_usd_per_hour * 100) for option, count in cover)
        assert cents == brute_force_price(num_units, options)


def test_takes_fewer_instances_where_the_price_is_equal():
    small, large = (
        _CoverOption(offer=cpu_offer("c7i.large", vcpus=2, price_usd_per_hour=0.1), units=1),
        _CoverOption(offer=cpu_offer("c7i.2xlarge", vcpus=8, price_usd_per_hour=0.4), units=4),
    )

    assert _cheapest_cover(5, [small, large]) == [(large, 1), (small, 1)]


def test_mixes_sizes_per_stage_and_counts_the_rounding():
    # By hand: 3 cores on c7i are 4 + 2 vCPUs; one core on m7a is sold only in fours here.
    offers = [
        cpu_offer("c7i.large", vcpus=2, price_usd_per_hour=0.09),
        cpu_offer("c7i.xlarge", vcpus=4, price_usd_per_hour=0.17),
        cpu_offer("m7a.xlarge", vcpus=4, price_usd_per_hour=0.24),
    ]
    stages = [
        Stage(first_layer=0, last_layer=0, device_type="cpu-c7i", num_replicas=3),
        Stage(first_layer=1, last_layer=1, device_type="cpu-m7a", num_replicas=1),
    ]

    plan = choose_instances(stages, offers)

    bought = [(g.stage, g.offer.instance_type.name, g.count, g.units_per_instance) for g in plan.groups]
    assert bought == [(0, "c7i.xlarge", 1, 2), (0, "c7i.large", 1, 1), (1, "m7a.xlarge", 1, 4)]
    assert plan.price_usd_per_hour == pytest.approx(0.17 + 0.09 + 0.24)
    assert plan.planned_price_usd_per_hour == pytest.approx(3 * 0.085 + 0.06)


def test_neighbouring_stages_on_one_type_have_machines_of_their_own():
    offers = [
        cpu_offer("c7i.large", vcpus=2, price_usd_per_hour=0.09),
        cpu_offer("c7i.2xlarge", vcpus=8, price_usd_per_hour=0.35),
    ]
    stages = [
        Stage(first_layer=0, last_layer=0, device_type="cpu-c7i", num_replicas=3),
        Stage(first_layer=1, last_layer=2, device_type="cpu-c7i", num_replicas=1),
    ]

    plan = choose_instances(stages, offers)

    # Together they would fit on one c7i.2xlarge of 0.35.
    assert plan.price_usd_per_hour == pytest.approx(4 * 0.09)
    assert [request.node_id for request in plan.node_requests()] == [
        "stage0-node0",
        "stage0-node1",
        "stage0-node2",
        "stage1-node0",
    ]


def test_unit_price_is_that_of_the_cheapest_size():
    offers = [
        cpu_offer("c7i.large", vcpus=2, price_usd_per_hour=0.09),
        cpu_offer("c7i.xlarge", vcpus=4, price_usd_per_hour=0.17),
        cpu_offer("t3.large", vcpus=2, price_usd_per_hour=0.01),
    ]

    prices = unit_prices(offers)

    assert list(prices) == ["cpu-c7i"]
    assert prices["cpu-c7i"] == pytest.approx(0.085)


def test_names_the_device_types_that_are_available_when_one_is_not():
    stages = [Stage(first_layer=0, last_layer=0, device_type="gpu-t4", num_replicas=1)]
    offers = [cpu_offer("c7i.large", vcpus=2, price_usd_per_hour=0.09)]

    with pytest.raises(ProvisioningError, match=r"no offer carries device type gpu-t4 .*carry: cpu-c7i"):
        choose_instances(stages, offers)


def test_unknown_device_type_is_named():
    stages = [Stage(first_layer=0, last_layer=0, device_type="tpu", num_replicas=1)]

    with pytest.raises(UnknownNameError, match="'tpu' is not a known device type"):
        choose_instances(stages, [])


def zoned(offer: InstanceOffer, zone: str, price_usd_per_hour: float) -> InstanceOffer:
    return dataclasses.replace(offer, zone=zone, price_usd_per_hour=price_usd_per_hour)


def test_a_plan_stands_in_the_zone_where_all_its_stages_together_are_cheapest():
    cores = cpu_offer("c7i.xlarge", vcpus=4, price_usd_per_hour=1.0)
    memory = cpu_offer("r6in.xlarge", vcpus=4, price_usd_per_hour=1.0)
    offers = [
        zoned(cores, "us-east-1a", 1.0),
        zoned(memory, "us-east-1a", 9.0),
        zoned(cores, "us-east-1b", 2.0),
        zoned(memory, "us-east-1b", 3.0),
        zoned(cores, "us-east-1c", 0.1),  # sells no r6in
    ]

    plan = choose_instances([Stage(0, 0, "cpu-c7i", 2), Stage(1, 1, "cpu-r6in", 2)], offers)

    assert {group.offer.zone for group in plan.groups} == {"us-east-1b"}
    assert plan.price_usd_per_hour == pytest.approx(5.0)


def test_the_planner_charges_what_is_bought():
    offers = [
        cpu_offer("c7i.xlarge", vcpus=4, price_usd_per_hour=0.19),
        cpu_offer("c7i.4xlarge", vcpus=16, price_usd_per_hour=0.61),
    ]
    sizes = instance_sizes("cpu-c7i", offers)
    cover = InstanceCover(
        [size.units for size in sizes], [size.price_usd_per_hour for size in sizes], most_units=40
    )

    for replicas in range(1, 41):
        bought = choose_instances([Stage(0, 0, "cpu-c7i", replicas)], offers)
        assert cover.price_usd_per_hour(replicas) == pytest.approx(bought.price_usd_per_hour)


def spot(offer: InstanceOffer, price_usd_per_hour: float, *, zone: str = "us-east-1a") -> InstanceOffer:
    return dataclasses.replace(
        offer,
        market=Market.SPOT,
        zone=zone,
        price_usd_per_hour=price_usd_per_hour,
        interruptions_per_hour=0.3,
        interruptions_source="test",
    )


LARGE = cpu_offer("c7i.large", vcpus=2, price_usd_per_hour=0.10)
XLARGE = cpu_offer("c7i.xlarge", vcpus=4, price_usd_per_hour=0.20)
MEMORY = cpu_offer("r6in.xlarge", vcpus=4, price_usd_per_hour=0.40)


def test_a_device_type_is_bought_in_its_own_market():
    offers = [LARGE, spot(LARGE, 0.03)]
    stages = [Stage(0, 0, "cpu-c7i", 1), Stage(1, 1, "cpu-c7i-spot", 2)]

    plan = choose_instances(stages, offers)

    assert [(g.offer.market, g.count, g.offer.price_usd_per_hour) for g in plan.groups] == [
        (Market.ON_DEMAND, 1, 0.10),
        (Market.SPOT, 2, 0.03),
    ]
    assert {group.offer.zone for group in plan.groups} == {"us-east-1a"}
    assert plan.rendezvous_usd_per_hour == 0
    assert plan.interruptions_per_hour == pytest.approx(0.6)
    assert unit_prices(offers)["cpu-c7i-spot"] == 0.03


def test_a_plan_all_on_spot_buys_the_machine_on_demand_for_which_that_adds_least():
    # By hand: c7i costs 0.20 - 0.06 = 0.14 more on-demand, r6in 0.40 - 0.10 = 0.30.
    offers = [XLARGE, MEMORY, spot(XLARGE, 0.06), spot(MEMORY, 0.10)]
    stages = [Stage(0, 0, "cpu-r6in-spot", 2), Stage(1, 1, "cpu-c7i-spot", 6)]

    plan = choose_instances(stages, offers)

    assert [(g.stage, g.offer.market, g.count) for g in plan.groups] == [
        (0, Market.SPOT, 1),
        (1, Market.ON_DEMAND, 1),
        (1, Market.SPOT, 2),
    ]
    assert plan.rendezvous_usd_per_hour == pytest.approx(0.14)
    assert plan.price_usd_per_hour == pytest.approx(0.10 + 3 * 0.06 + 0.14)
    assert plan.rounding_usd_per_hour == pytest.approx(0.0)
    assert {group.device_type for group in plan.groups} == {"cpu-r6in-spot", "cpu-c7i-spot"}


def test_a_plan_all_on_spot_needs_an_on_demand_price():
    with pytest.raises(ProvisioningError, match=r"one machine must be on-demand.*c7i\.large"):
        choose_instances([Stage(0, 0, "cpu-c7i-spot", 1)], [spot(LARGE, 0.03)])


def test_units_in_larger_instances_bring_fewer_interruptions():
    # By hand: 8 units in two instances of 4 at 0.3, or in eight of 1.
    large = spot(cpu_offer("c7i.2xlarge", vcpus=8, price_usd_per_hour=0.4), 0.1)

    assert interruptions_per_unit("cpu-c7i-spot", [large]) == pytest.approx(2 * 0.3 / 8)
    assert interruptions_per_unit("cpu-c7i-spot", [spot(LARGE, 0.03)]) == pytest.approx(0.3)
    assert interruptions_per_unit("cpu-c7i", [LARGE]) == 0.0


def test_zones_are_in_the_order_of_their_price():
    offers = [zoned(LARGE, f"us-east-1{zone}", price) for zone, price in (("a", 0.3), ("b", 0.1), ("c", 0.2))]

    plans = instances_by_zone([Stage(0, 0, "cpu-c7i", 1)], offers)

    assert [plan.groups[0].offer.zone for plan in plans] == ["us-east-1b", "us-east-1c", "us-east-1a"]


def card_host(name, *, cards, host_gib):
    offer = cpu_offer(name, vcpus=4 * cards, price_usd_per_hour=0.5 * cards)
    machine = dataclasses.replace(
        offer.instance_type,
        accelerator_name="t4",
        accelerator_count=cards,
        accelerator_memory_bytes_each=16 * 1024**3,
        memory_bytes=host_gib * 1024**3,
    )
    return dataclasses.replace(offer, instance_type=machine)


def test_a_host_with_too_little_memory_for_a_worker_of_each_card_is_not_offered():
    roomy, tight = (
        card_host("g4dn.xlarge", cards=1, host_gib=16),
        card_host("g4dn.12xlarge", cards=4, host_gib=48),
    )
    core = cpu_offer("c7i.large", vcpus=2, price_usd_per_hour=0.1)

    found = offers_that_hold_workers(
        ["gpu-t4", "cpu-c7i"], [roomy, tight, core], host_bytes_of_worker=13 * 1024**3
    )

    assert found == (roomy, core)


def test_a_card_that_no_host_has_the_memory_for_is_named_with_what_the_largest_has():
    offers = [card_host("g4dn.xlarge", cards=1, host_gib=16)]

    with pytest.raises(ProvisioningError, match=r"host of gpu-t4 must have 2e\+10 .* largest offer has 1\.7"):
        offers_that_hold_workers(["gpu-t4"], offers, host_bytes_of_worker=2e10)
