import math
from dataclasses import replace

import pytest

from heterps_core.device_types import DEVICE_TYPES, OWN_DEVICE_TYPES, in_markets
from heterps_core.errors import (
    BudgetExceededError,
    ConfigurationError,
    InfeasiblePlanError,
    ProvisioningError,
)
from heterps_core.hardware import InstanceOffer, Market
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.plans.scheduling_plan import SchedulingPlan, Stage
from infra.billing.caps import Caps
from infra.inventory import MachineKind
from infra.prices.price_catalogue import PriceCatalogue, write_refreshed
from infra.providers.local import LocalProvider
from tasks.provisioning import (
    check_lifetime,
    check_rentable,
    find_offers,
    not_rentable,
    provision,
    sold_types,
    usd_for,
)
from tests.infra.builders import offer
from tests.infra.prices.aws_answers import NOW
from tests.tasks.builders import make_problem, make_result

ON_DEMAND = offer("c7i.large", price_usd_per_hour=0.10)


def on_spot(zone: str, price_usd_per_hour: float) -> InstanceOffer:
    return replace(
        ON_DEMAND,
        market=Market.SPOT,
        zone=zone,
        price_usd_per_hour=price_usd_per_hour,
        interruptions_per_hour=0.5,
        interruptions_source="test",
    )


OFFERS = [ON_DEMAND, on_spot("us-east-1a", 0.03), on_spot("us-east-1b", 0.04)]


def planned(device_type: str = "cpu-c7i-spot", *, replicas: int = 2) -> SchedulingPlan:
    """Ten hours at 0.03 USD/hour a unit, and 0.07 more for the one that is bought on-demand."""
    price = 0.03 * replicas + 0.07
    return SchedulingPlan(
        scheduler="exact",
        seed=0,
        stages=(Stage(0, 1, device_type, replicas),),
        throughput_samples_per_s=1e3,
        price_usd_per_hour=price,
        cost_usd=10 * price,
        cost_lower_bound_usd=10 * price,
        optimality_gap=0.0,
        num_evaluations=1,
        search_seconds=0.1,
    )


def test_the_machine_that_must_stay_is_in_price_cost_and_words():
    bought = provision.fn(planned(), OFFERS, provider="aws", caps=Caps())

    # By hand: one unit at 0.10 in place of 0.03, and two disks and addresses, for ten hours.
    assert bought.launch_plan.price_usd_per_hour == pytest.approx(0.13)
    services_usd_per_hour = 2 * (40 * 0.08 / 730 + 0.005 + 0.001848)
    assert bought.predicted_cost_usd == pytest.approx(1.3 + 10 * services_usd_per_hour)
    assert "1 x c7i.large + 1 x c7i.large on spot cost 0.1300 USD/hour" in bought.summary
    assert "0.0700 of it for the one machine on-demand, 0.5 interruptions an hour expected" in bought.summary
    assert "days old" in bought.summary


def test_an_unavailable_machine_is_tried_in_the_next_zone_and_then_on_demand():
    bought = provision.fn(planned(), OFFERS, provider="aws", caps=Caps())

    assert [
        (plan.groups[0].offer.zone, plan.price_usd_per_hour)
        for plan in (bought.launch_plan, *bought.fallback_plans)
    ] == [
        ("us-east-1a", pytest.approx(0.13)),
        ("us-east-1b", pytest.approx(0.14)),
        ("us-east-1a", pytest.approx(0.20)),
        ("us-east-1b", pytest.approx(0.20)),
    ]


@pytest.mark.parametrize(
    ("caps", "num_fallbacks"),
    # By hand: 1.30 USD in ten hours, 0.225 for disks, addresses and requests of the machines, 0.072 for reports;
    # 0.01 USD/hour more in the next zone.
    [(Caps(max_usd_per_hour=0.17), 1), (Caps(max_usd_per_run=1.70), 1), (Caps(max_usd_per_run=1.60), 0)],
)
def test_nothing_beyond_a_cap_is_tried(caps, num_fallbacks):
    bought = provision.fn(planned(), OFFERS, provider="aws", caps=caps)

    assert len(bought.fallback_plans) == num_fallbacks


def test_the_machine_that_must_stay_counts_against_a_cap():
    with pytest.raises(BudgetExceededError, match="must stay within 1 USD per run"):
        provision.fn(planned(), OFFERS, provider="aws", caps=Caps(max_usd_per_run=1.0))


@pytest.mark.parametrize("caps", [Caps(max_usd_per_hour=0.14), Caps(max_usd_per_run=1.40)])
def test_disks_and_addresses_count_against_the_caps_where_they_are_paid_for(caps):
    # By hand: 0.13 USD/hour are within these caps, and 0.1525 are not, nor with 0.072 USD for reports 1.597.
    with pytest.raises(BudgetExceededError, match=r"1\.597|0\.1525"):
        provision.fn(planned(), OFFERS, provider="aws", caps=caps)

    in_dry_run = provision.fn(planned(), OFFERS, provider="local", caps=caps)
    assert in_dry_run.predicted_cost_usd == pytest.approx(1.3)


def test_a_dry_run_has_nothing_to_turn_to():
    bought = provision.fn(planned(), OFFERS, provider="local", caps=Caps())

    assert bought.fallback_plans == ()
    assert "would cost" in bought.summary


def test_offers_on_spot_come_with_on_demand_ones_and_with_a_rate_of_interruptions(tmp_path):
    catalogue = PriceCatalogue([write_refreshed(tmp_path, OFFERS, at=NOW)])

    found = find_offers.fn(["cpu-c7i-spot"], catalogue=catalogue)

    assert {(o.zone, str(o.market), o.interruptions_per_hour > 0) for o in found} == {
        (None, "on-demand", False),
        ("us-east-1a", "spot", True),
        ("us-east-1b", "spot", True),
    }


def test_offers_carry_the_asked_device_types_on_demand():
    offers = find_offers.fn(["cpu-c7i", "gpu-t4"])

    # With the families that are as fast, to turn to where these cannot be had.
    assert {offer.instance_type.family for offer in offers} == {"c7i", "m7i", "r7i", "g4dn"}
    assert {offer.market for offer in offers} == {Market.ON_DEMAND}


def test_types_without_an_offer_in_a_market_are_no_candidates():
    offers = find_offers.fn([*DEVICE_TYPES])

    found = sold_types(in_markets(["gpu-t4", "cpu-c7i", "cpu-c8g"], list(Market)), offers)

    assert found == ["gpu-t4", "cpu-c7i", "cpu-c8g"]  # the bundled prices have no spot market
    assert sold_types(in_markets(["gpu-t4", "cpu-c7i"], list(Market)), [offer("c7i.large")]) == ["cpu-c7i"]


def test_a_cap_is_held_against_the_plan_and_not_against_its_dry_run():
    plan = make_result(make_problem()).plan
    offers = find_offers.fn(["cpu-c7i", "gpu-t4"])
    allowed = provision.fn(plan, offers, provider="local", caps=Caps())

    assert allowed.is_dry_run
    assert allowed.launch_plan.price_usd_per_hour <= allowed.cloud_plan.price_usd_per_hour
    too_low = allowed.cloud_plan.price_usd_per_hour * 0.99
    with pytest.raises(BudgetExceededError, match="nothing was launched"):
        provision.fn(plan, offers, provider="local", caps=Caps(max_usd_per_hour=too_low))


def test_price_over_time():
    assert usd_for(7.2, 500.0) == pytest.approx(1.0)


def test_metal_sizes_are_not_offered_as_they_start_late_and_cost_no_less():
    families = {"c7i", "g4dn"}
    offered = [
        offer
        for offer in PriceCatalogue().offers(region="us-east-1")
        if offer.instance_type.family in families
    ]
    metal = {offer.instance_type.name for offer in offered if offer.instance_type.is_metal}

    found = {offer.instance_type.name for offer in find_offers.fn(["cpu-c7i", "gpu-t4"])}

    assert metal == {"c7i.metal-24xl", "c7i.metal-48xl", "g4dn.metal"}
    assert not found & metal
    assert {"c7i.48xlarge", "g4dn.12xlarge"} <= found


def evaluation_of(hours):
    """The builder's plan for as many samples as it trains in these hours."""
    problem = make_problem()
    stages = make_result(problem).plan.stages
    samples = int(evaluate(problem, stages).throughput_samples_per_s * hours * 3600)
    return evaluate(replace(problem, num_samples=samples, num_epochs=1), stages)


def test_a_night_that_outlives_its_machines_is_refused_with_the_floor_that_it_would_take():
    evaluation = evaluation_of(hours=7)
    # By hand: 70 s to start and 30 s to end leave 21,500 s of six hours.
    floor = math.ceil(evaluation.throughput_samples_per_s * 7 * 3600 / 21_500)

    with pytest.raises(InfeasiblePlanError) as refused:
        check_lifetime(evaluation, provider="aws")

    text = str(refused.value)
    assert "6.0 hours" in text
    assert "7.0 hours" in text
    assert f"throughput_floor_samples_per_s to {floor:,} or more" in text
    assert "ready_by" in text


@pytest.mark.parametrize(("hours", "provider"), [(5.95, "aws"), (7, "local")])
def test_a_night_within_the_lifetime_and_every_dry_run_may_start(hours, provider):
    check_lifetime(evaluation_of(hours), provider=provider)


def test_start_up_counts_against_the_lifetime():
    with pytest.raises(InfeasiblePlanError):
        check_lifetime(evaluation_of(hours=5.99), provider="aws")


class WithImages(LocalProvider):
    """Boots machines of some architectures; an error is what the cloud answers in place of them."""

    missing: dict[str, str] | ProvisioningError

    def missing_images(self):
        if isinstance(self.missing, ProvisioningError):
            raise self.missing
        return self.missing


@pytest.fixture
def rented_from(tmp_path):
    return WithImages(tmp_path)


ARM_TYPES = {name for name, each in DEVICE_TYPES.items() if each.architecture == "arm64"}


@pytest.mark.parametrize(
    ("missing", "refused"),
    [
        ({}, set()),
        ({"arm64": "make one"}, ARM_TYPES),
        ({"x86_64": "make one"}, DEVICE_TYPES.keys() - ARM_TYPES),
        # An account that is not set up yet plans with all types.
        ({"x86_64": "make one", "arm64": "make one"}, set()),
        (ProvisioningError("no answer"), ARM_TYPES),
    ],
    ids=["all images", "no arm64 image", "no x86_64 image", "no image", "no answer"],
)
def test_device_types_without_an_image_are_not_rentable(rented_from, missing, refused):
    rented_from.missing = missing

    assert not_rentable(rented_from).keys() == refused


def test_a_region_without_any_image_has_no_device_types_where_it_is_one_of_several(rented_from):
    rented_from.missing = {"x86_64": "make one", "arm64": "make one"}

    assert not_rentable(rented_from, is_one_of_several=True).keys() == DEVICE_TYPES.keys()


def test_a_named_device_type_without_an_image_is_refused_with_what_makes_one(rented_from):
    rented_from.missing = {"arm64": "no image; run make-image"}

    check_rentable(["cpu-c7i", "gpu-t4-spot"], provider=rented_from)
    with pytest.raises(
        ConfigurationError, match="cpu-c8g cannot be rented: no image; run make-image, or leave"
    ):
        check_rentable(["cpu-c7i", "cpu-c8g-spot"], provider=rented_from)


@pytest.mark.parametrize(
    "caps", [Caps(), Caps(max_usd_per_hour=1.0, max_usd_per_run=1.0, max_usd_per_month=1.0)]
)
def test_a_machine_that_is_owned_is_bought_for_nothing(caps):
    free = replace(planned("cpu-c7i"), price_usd_per_hour=0.0, cost_usd=0.0, cost_lower_bound_usd=0.0)

    bought = provision.fn(free, [replace(ON_DEMAND, price_usd_per_hour=0.0)], provider="local", caps=caps)

    assert (bought.cloud_plan.price_usd_per_hour, bought.predicted_cost_usd) == (0.0, 0.0)
    assert bought.cloud_plan.only(["stage0-node0"]).price_usd_per_hour == 0.0


def test_stages_on_this_machine_share_its_price():
    """Two stages for two hours at 0.6 USD an hour, which is paid once."""
    kind = MachineKind(
        kind="box", home="here", count=1, cores=4, memory_gb=16, price_usd_per_hour=0.6, network_gbit_per_s=10
    )
    OWN_DEVICE_TYPES.update({each.name: each for each in kind.device_types()})
    two_stages = (Stage(0, 0, "cpu-box", 1), Stage(1, 1, "cpu-box", 2))
    plan = replace(planned(), stages=two_stages, price_usd_per_hour=0.6, cost_usd=1.2)

    bought = provision.fn(plan, [*kind.offers()], provider="here", caps=Caps(max_usd_per_run=1.21))

    assert bought.cloud_plan.price_usd_per_hour == pytest.approx(0.6)
    assert bought.predicted_cost_usd == pytest.approx(1.2)
    assert bought.cloud_plan.machines == "1 x box.4"
