import dataclasses

import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import InstanceOffer, InstanceType, Market
from heterps_core.plans.provisioning_plan import InstanceGroup, ProvisioningPlan


def group(stage: int, *, count: int, units: int, price_usd_per_hour: float = 1.0) -> InstanceGroup:
    machine = InstanceType(
        name="c7i.xlarge",
        vcpus=2 * units,
        memory_bytes=8 * 1024**3,
        accelerator_name=None,
        accelerator_count=0,
        accelerator_memory_bytes_each=0,
        network_bandwidth_bytes_per_s=1e8,
    )
    offer = InstanceOffer(
        instance_type=machine,
        region="us-east-1",
        zone=None,
        market=Market.ON_DEMAND,
        price_usd_per_hour=price_usd_per_hour,
        price_as_of="2026-07-20",
        price_source="test",
    )
    return InstanceGroup(
        stage=stage, device_type="cpu-c7i", offer=offer, count=count, units_per_instance=units
    )


def plan(replicas: tuple[int, ...], *groups: InstanceGroup) -> ProvisioningPlan:
    return ProvisioningPlan(replicas=replicas, groups=groups, planned_price_usd_per_hour=2.0)


def test_fills_replicas_instance_by_instance_and_keeps_one_for_each():
    requests = plan(
        (5, 1), group(0, count=1, units=4), group(0, count=2, units=2), group(1, count=1, units=8)
    )

    assert [(r.node_id, r.stage, r.num_workers) for r in requests.node_requests()] == [
        ("stage0-node0", 0, 3),
        ("stage0-node1", 0, 1),
        ("stage0-node2", 0, 1),
        ("stage1-node0", 1, 1),
    ]


def test_says_what_whole_instances_cost_beyond_the_units():
    rounded = plan((3,), group(0, count=2, units=2, price_usd_per_hour=1.5))

    assert rounded.price_usd_per_hour == 3.0
    assert rounded.rounding_usd_per_hour == 1.0


@pytest.mark.parametrize(
    ("replicas", "count", "units"),
    [((5,), 2, 2), ((1,), 2, 2), ((1, 1), 1, 1)],  # too few units; an idle instance; a stage without any
)
def test_refuses_instances_that_do_not_fit_the_replicas(replicas, count, units):
    with pytest.raises(ConfigurationError, match="each replica a unit"):
        plan(replicas, group(0, count=count, units=units))


def test_refuses_a_group_for_a_stage_that_is_not_there():
    with pytest.raises(ConfigurationError, match=r"stages \[3\]"):
        plan((1,), group(0, count=1, units=1), group(3, count=1, units=1))


def other_offer(name: str, price_usd_per_hour: float, **place) -> InstanceOffer:
    planned = group(0, count=1, units=1).offer
    machine = dataclasses.replace(planned.instance_type, name=name)
    return dataclasses.replace(planned, instance_type=machine, price_usd_per_hour=price_usd_per_hour, **place)


def with_alternatives(*alternatives: InstanceOffer, count: int = 1) -> InstanceGroup:
    return dataclasses.replace(group(0, count=count, units=1), alternatives=alternatives)


def test_every_machine_may_be_an_alternative_and_is_then_priced_as_that():
    costlier = other_offer("m7i.xlarge", 1.2)
    made = plan((2,), with_alternatives(costlier, count=2))

    first, _ = made.node_requests()

    assert first.alternatives == (costlier,)
    had = first.with_offer(costlier)
    assert (had.offer.price_usd_per_hour, had.alternatives) == (1.2, ())
    assert (made.groups[0].highest_price_usd_per_hour, made.price_usd_per_hour) == (2.4, 2.0)
    assert [offer.instance_type.name for offer in made.offers] == ["c7i.xlarge", "m7i.xlarge"]
    with pytest.raises(ConfigurationError, match=r"one of its 1 alternatives, got r7i\.xlarge"):
        first.with_offer(other_offer("r7i.xlarge", 1.1))


@pytest.mark.parametrize(
    "alternative",
    [
        other_offer("c7i.xlarge", 1.0),  # the offer itself
        other_offer("m7i.xlarge", 1.0, zone="us-east-1b"),
        other_offer("m7i.xlarge", 1.0, market=Market.SPOT),
    ],
)
def test_refuses_an_alternative_of_another_place_or_market(alternative):
    with pytest.raises(ConfigurationError, match="another offer of its market in us-east-1"):
        with_alternatives(alternative)


def test_a_part_of_a_plan_asks_for_the_machines_of_these_names_and_for_no_other():
    groups = (group(0, count=1, units=4), group(0, count=2, units=2), group(1, count=2, units=8))
    whole = plan((7, 9), *groups)
    lost = ("stage0-node1", "stage0-node2", "stage1-node1")

    part = whole.only(lost)

    assert part.node_requests() == tuple(
        request for request in whole.node_requests() if request.node_id in lost
    )
    assert part.price_usd_per_hour == 3.0
    assert part.planned_price_usd_per_hour == pytest.approx(2.0 * 3 / 5)
    assert ProvisioningPlan.from_json(part.to_json()) == part


def test_a_part_may_leave_out_all_machines_of_a_stage():
    whole = plan((2, 3, 1), *(group(stage, count=1, units=4) for stage in range(3)))

    assert [request.node_id for request in whole.only(["stage1-node0"]).node_requests()] == ["stage1-node0"]
