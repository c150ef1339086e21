import pytest

from heterps_core.planning.explain.cost_range import worth_of_measuring
from heterps_core.planning.problem.estimates import Estimate, Quantity
from heterps_core.planning.problem.scheduling_problem import LayerCosts, SchedulingProblem, UnitType
from heterps_core.plans.scheduling_plan import Stage

KEPT = (Stage(0, 0, "cpu-a", 1),)


def computing(name):
    return Estimate(device_type=name, quantity=Quantity.COMPUTING)


def problem(*, spread=0.5, floor_samples_per_s=0.0, b_seconds=0.12):
    """One layer: 360,000 batches take 10 hours on a, 12 on b, at 0.36 USD an hour; so 3.60 and 4.32 USD."""
    unit = {
        "price_usd_per_hour": 0.36,
        "memory_bytes": 1e9,
        "bandwidth_bytes_per_s": 1e9,
        "compute_parallel_fraction": 1.0,
        "communication_parallel_fraction": 1.0,
    }
    layer = LayerCosts(
        name="fc",
        kind="fully_connected",
        is_sharded=False,
        state_bytes=1_000.0,
        output_bytes_per_sample=4.0,
        compute_seconds={"cpu-a": 0.1, "cpu-b": b_seconds},
        communication_seconds={"cpu-a": 0.0, "cpu-b": 0.0},
        compute_relative_spread={"cpu-a": spread, "cpu-b": spread},
    )
    return SchedulingProblem(
        model="tiny",
        batch_size=100,
        profile_batch_size=100,
        num_samples=36e6,
        num_epochs=1.0,
        throughput_floor_samples_per_s=floor_samples_per_s,
        layers=(layer,),
        device_types={
            "cpu-a": UnitType(max_units=1, **unit),
            "cpu-b": UnitType(max_units=1, **unit),
        },
    )


def test_the_worth_of_a_used_type_is_the_mean_of_what_it_costs_too_much_where_it_is_slow():
    worth = worth_of_measuring(problem(), KEPT, computing("cpu-a"))

    # By hand: at 1.25 times the time it costs 4.50 instead of 4.32 USD, at 1.5 times 5.40; when fast it stays.
    assert worth.most_usd == pytest.approx(5.40 - 4.32)
    assert worth.expected_usd == pytest.approx(0.25 * (4.50 - 4.32) + 0.125 * (5.40 - 4.32))
    assert (worth.may_break, worth.can_change_choice, worth.largest_spread) == (False, True, 0.5)


def test_the_worth_of_an_unused_type_is_the_mean_of_what_it_would_save_where_it_is_fast():
    worth = worth_of_measuring(problem(), KEPT, computing("cpu-b"))

    # By hand: at 0.75 times the time it costs 3.24 instead of 3.60 USD, at 0.5 times 2.16.
    assert worth.most_usd == pytest.approx(3.60 - 2.16)
    assert worth.expected_usd == pytest.approx(0.25 * (3.60 - 3.24) + 0.125 * (3.60 - 2.16))


def test_a_type_that_cannot_change_the_choice_is_worth_nothing():
    # By hand: b costs 7.2 USD, and at half the time as much as a.
    worth = worth_of_measuring(problem(b_seconds=0.2), KEPT, computing("cpu-b"))

    assert (worth.expected_usd, worth.most_usd, worth.can_change_choice) == (0.0, 0.0, False)


def test_a_type_without_spread_is_worth_nothing():
    worth = worth_of_measuring(problem(spread=0.0), KEPT, computing("cpu-a"))

    assert (worth.expected_usd, worth.largest_spread, worth.can_change_choice) == (0.0, 0.0, False)


def test_a_plan_that_may_miss_the_floor_is_told_apart():
    # By hand: a reaches 1,000 samples/s, 800 at 1.25 times the time and 667 at 1.5 times; b reaches 833.
    worth = worth_of_measuring(problem(floor_samples_per_s=750.0), KEPT, computing("cpu-a"))

    assert worth.may_break
    assert worth.most_usd == pytest.approx(4.50 - 4.32)


def test_where_nothing_else_meets_the_floor_knowing_changes_nothing():
    worth = worth_of_measuring(problem(floor_samples_per_s=900.0), KEPT, computing("cpu-a"))

    assert not worth.can_change_choice
