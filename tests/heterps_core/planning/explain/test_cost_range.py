from dataclasses import replace

import pytest

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.explain.cost_range import LEAST_SAVING, find_cost_range, find_measurements
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.plans.scheduling_plan import Stage
from tests.heterps_core.planning.explain.trying_all import (
    feasible_plans,
    tiny_problem,
    with_spread,
    with_times,
)
from tests.tasks import builders

KEPT = (Stage(0, 0, "cpu-c7i", 4), Stage(1, 2, "gpu-t4", 1))


def test_the_range_by_hand():
    # The embedding's 4 units take 10 ms for 100 samples at 0.9 USD/hour: 36,000 samples cost 0.0009 USD.
    found = find_cost_range(with_spread(builders.make_problem(), {"cpu-c7i": 0.2, "gpu-t4": 0.5}), KEPT)

    # Slow: the cpu takes 12 ms, the gpu 1.5 * 8 = 12 ms. Fast: 8 ms and 4 ms.
    assert found.low_usd == pytest.approx(0.0009 * 0.8)
    assert found.high_usd == pytest.approx(0.0009 * 1.2)
    assert found.lowest_throughput_samples_per_s == pytest.approx(100 / 0.012)
    assert not found.misses_floor


def test_the_spread_of_communication_is_in_the_range():
    problem = builders.make_problem()
    units = {
        name: replace(unit, bandwidth_bytes_per_s=40_000.0, communication_relative_spread=0.5)
        for name, unit in problem.device_types.items()
    }

    found = find_cost_range(replace(problem, device_types=units), (KEPT[0], replace(KEPT[1], num_replicas=2)))

    # By hand: the cpu's 4 units move 800 bytes in 5 ms, the gpu's 2 in 10; slow 15; fast 5, but the cpu computes 10.
    assert found.low_usd == pytest.approx(0.01 * 360 / 3600 * 1.4)
    assert found.high_usd == pytest.approx(0.015 * 360 / 3600 * 1.4)


def test_a_floor_that_is_missed_at_the_slow_end_is_told():
    problem = builders.make_problem(throughput_floor_samples_per_s=9_000.0)

    assert find_cost_range(with_spread(problem, {"cpu-c7i": 0.2}), KEPT).misses_floor


def test_a_spread_wider_than_the_time_itself_leaves_a_tenth():
    found = find_cost_range(with_spread(builders.make_problem(), {"cpu-c7i": 3.0, "gpu-t4": 3.0}), KEPT)

    assert found.low_usd == pytest.approx(0.0009 * 0.1)
    assert found.high_usd == pytest.approx(0.0009 * 4)


def test_without_a_spread_there_is_no_range_and_nothing_to_measure():
    problem = builders.make_problem()
    stages = find_optimum(problem).stages

    assert find_cost_range(problem, stages) is None
    assert find_measurements(problem, stages) == ()


@pytest.mark.parametrize("floor_samples_per_s", [0.0, 2_000.0])
@pytest.mark.parametrize("seed", range(6))
def test_a_measurement_saves_what_the_plan_costs_more_than_the_best_of_all_plans(seed, floor_samples_per_s):
    problem = tiny_problem(seed, floor_samples_per_s=floor_samples_per_s)
    stages = find_optimum(problem).stages
    least_usd = LEAST_SAVING * evaluate(problem, stages).cost_usd
    weights = {-1.0: 0.125, -0.5: 0.25, 0.5: 0.25, 1.0: 0.125}

    found = {
        (worth.device_type, worth.quantity): worth
        for worth in find_measurements(
            with_spread(problem, dict.fromkeys(problem.device_types, 0.5), communication=0.5), stages
        )
    }

    for name in problem.device_types:
        for quantity in ("computing", "communication"):
            regrets = {}
            for position in weights:
                plans = feasible_plans(with_times(problem, **{quantity: {name: 1 + 0.5 * position}}))
                best_usd = min((usd for _, _, usd in plans), default=0.0)
                kept_usd = {plan: usd for _, plan, usd in plans}.get(stages, float("inf"))
                regrets[position] = kept_usd - best_usd if plans else 0.0
            # What costs too little too much at an end is not looked at on the way there.
            told = {at: usd for at, usd in regrets.items() if regrets[1.0 if at > 0 else -1.0] >= least_usd}
            finite = {at: usd for at, usd in told.items() if usd < float("inf")}
            worth = found.pop((name, quantity), None)
            assert (worth is None) == (not told)
            if worth is not None:
                assert worth.may_break == (finite != told)
                assert worth.most_usd == pytest.approx(max(finite.values(), default=0.0), rel=1e-6)
                expected_usd = sum(weights[at] * usd for at, usd in finite.items())
                assert worth.expected_usd == pytest.approx(expected_usd, rel=1e-6, abs=1e-9)
                assert worth.is_slow_end == (max(told, key=told.__getitem__) > 0)
    assert not found


def test_a_plan_that_breaks_a_limit_is_told_first_and_with_the_plan_that_keeps_it():
    # At 2.5 times the time the embedding takes 12.5 ms on all 8 cpu units; the floor allows 11.1, and the gpu's 8
    # units do all layers in 11.
    problem = with_spread(builders.make_problem(throughput_floor_samples_per_s=9_000.0), {"cpu-c7i": 1.5})

    worst = find_measurements(problem, KEPT)[0]

    assert (worst.device_type, worst.may_break, worst.is_slow_end) == ("cpu-c7i", True, True)
    assert [(move.first_layer, move.to_type) for move in worst.moves] == [(0, "gpu-t4")]
