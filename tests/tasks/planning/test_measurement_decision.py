from dataclasses import replace
from datetime import UTC, datetime

import pytest

from heterps_core.planning.explain.cost_range import MeasurementWorth
from heterps_core.planning.problem.estimates import Quantity
from heterps_core.profiling.device_profile import DeviceProfile
from heterps_core.units import BYTES_PER_GIB
from tasks.planning.measurement_decision import MeasurementDecision, decide_measurements
from tests.heterps_core.profiling.builders import GRAPH, make_profile
from tests.infra.builders import offer
from tests.tasks.builders import make_problem

WORTH = MeasurementWorth(
    device_type="cpu-c7i",
    quantity=Quantity.COMPUTING,
    largest_spread=0.5,
    expected_usd=0.002,
    most_usd=0.01,
    may_break=False,
)
NO_WORTH = replace(WORTH, expected_usd=0.0, most_usd=0.0)


def decision(worth=WORTH, *, cost_usd=0.05, nights=30, instance_type="c7i.large", measured=None):
    return MeasurementDecision(
        worth=worth, nights=nights, instance_type=instance_type, cost_usd=cost_usd, measured=measured
    )


def test_rented_where_all_nights_together_save_more_than_it_costs():
    # By hand: 30 nights of 0.002 USD are 0.06 USD, 20 are 0.04.
    assert decision().is_rented
    assert not decision(nights=20).is_rented
    assert decision().text == (
        "rented as c7i.large: may save up to 0.01 USD a night, 0.002 expected (0.06 in 30 nights), costs 0.0500 USD"
    )
    assert decision(nights=20).text.startswith("not rented: may save up to 0.01 USD a night")


def test_not_rented_where_the_plan_stays_the_same_whatever_it_costs():
    free = decision(NO_WORTH, cost_usd=0.0)

    assert not free.is_rented
    assert free.text.startswith("not rented: whatever its true speed within ±50%, the plan stays the same")


def test_rented_where_the_plan_may_break_a_constraint():
    assert decision(replace(NO_WORTH, may_break=True)).is_rented


def test_not_rented_where_a_measurement_still_counts():
    profile = replace(make_profile(), measured_at=datetime(2026, 11, 21, tzinfo=UTC).isoformat())
    kept = DeviceProfile(device_type="cpu-c7i", instance_type="c7i.large", is_dry_run=False, profile=profile)

    assert not decision(measured=kept).is_rented
    assert "measured on c7i.large 2026-11-21, which counts until 2026-12-21" in decision(measured=kept).text


def test_not_rented_where_it_cannot_be_measured():
    assert "none of its instances, or its cards, holds" in decision(instance_type=None, cost_usd=0.0).text
    assert not decision(instance_type=None, cost_usd=0.0).is_rented


def test_a_card_is_rented_as_a_processor_is_unless_it_is_too_small_for_the_tables():
    host = replace(
        offer("g4dn.4xlarge").instance_type,
        memory_bytes=64 * BYTES_PER_GIB,
        accelerator_name="t4",
        accelerator_count=1,
        accelerator_memory_bytes_each=16 * BYTES_PER_GIB,
    )
    card = replace(offer(price_usd_per_hour=1.204), instance_type=host)
    large = replace(GRAPH, layers=(replace(GRAPH.layers[0], parameter_bytes=17_000_000_000), GRAPH.layers[1]))

    _, fits = decide(with_spread(0.5), card)
    _, does_not = decide(with_spread(0.5), card, graph=large)

    assert (fits.device_type, fits.instance_type) == ("gpu-t4", "g4dn.4xlarge")
    assert does_not.instance_type is None


def decide(problem, *offers, minimum_billed_s=60.0, graph=GRAPH):
    return decide_measurements.fn(
        problem, graph, offers, measured={}, nights=30, minimum_billed_s=minimum_billed_s
    )


def with_spread(spread):
    problem = make_problem(throughput_floor_samples_per_s=0.0)
    return replace(
        problem,
        layers=tuple(
            replace(layer, compute_relative_spread=dict.fromkeys(layer.compute_seconds, spread))
            for layer in problem.layers
        ),
    )


def test_the_cost_is_that_of_three_minutes_of_the_cheapest_machine():
    processors, cards = decide(
        with_spread(0.5), offer(price_usd_per_hour=0.09), offer("c7i.xlarge", price_usd_per_hour=0.08)
    )

    # By hand: 120 s to boot, 30 s to measure, 30 s to end are a twentieth of an hour.
    assert (processors.instance_type, processors.cost_usd) == ("c7i.xlarge", pytest.approx(0.08 / 20))
    assert (cards.device_type, cards.instance_type) == ("gpu-t4", None)


def test_the_shortest_billed_time_is_paid_in_any_case():
    processors, _ = decide(with_spread(0.5), offer(price_usd_per_hour=0.09), minimum_billed_s=3600.0)

    assert processors.cost_usd == pytest.approx(0.09)


def test_without_doubt_about_the_times_nothing_is_rented():
    assert not any(each.is_rented for each in decide(with_spread(0.0), offer()))
