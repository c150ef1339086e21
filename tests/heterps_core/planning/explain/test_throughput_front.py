from dataclasses import replace

import pytest

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.explain.throughput_front import (
    MOST_COST_FACTOR,
    placement_changes,
    price_of_throughput,
    sweep_front,
)
from heterps_core.planning.search.optimum import find_optimum, highest_throughput
from tests.heterps_core.planning.explain.trying_all import feasible_plans, placement_of, tiny_problem


def costs_and_throughputs(problem):
    """(cost, throughput) of every plan, the floor left aside."""
    unfloored = replace(problem, throughput_floor_samples_per_s=0.0)
    return [
        (cost, evaluate(unfloored, stages).throughput_samples_per_s)
        for _, stages, cost in feasible_plans(unfloored)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_no_plan_is_as_fast_as_a_point_and_cheaper(seed):
    problem = tiny_problem(seed)
    plans = costs_and_throughputs(problem)

    front = sweep_front(problem, find_optimum(problem).stages)

    assert len(front) > 3
    for point in front:
        throughput = point.throughput_samples_per_s * (1 - 1e-12)
        assert point.cost_usd == pytest.approx(min(cost for cost, fast in plans if fast >= throughput))
        assert point.is_proven
    assert front[0].cost_usd == pytest.approx(min(plans)[0])
    speeds = [point.throughput_samples_per_s for point in front]
    costs = [point.cost_usd for point in front]
    assert speeds == sorted(set(speeds))
    assert costs == sorted(set(costs))
    assert costs[-1] > MOST_COST_FACTOR * costs[0] or speeds[-1] >= 0.5 * max(fast for _, fast in plans)


def test_the_plan_above_the_problems_floor_is_a_point():
    problem = tiny_problem(0, floor_samples_per_s=9_000.0)
    stages = find_optimum(problem).stages

    [mine] = [point for point in sweep_front(problem, stages) if point.stages == stages]

    price = sum(mine.usd_per_hour_of_types.values())
    assert price == pytest.approx(evaluate(problem, stages).price_usd_per_hour)


@pytest.mark.parametrize("seed", range(4))
def test_the_highest_throughput_is_that_of_all_plans(seed):
    problem = tiny_problem(seed)

    fastest = max(fast for _, fast in costs_and_throughputs(problem))

    assert highest_throughput(problem) == pytest.approx(fastest, rel=1e-4)


def test_more_throughput_costs_the_difference_to_the_cheapest_plan_above_it():
    problem = tiny_problem(0)
    plans = costs_and_throughputs(problem)
    floor = 12_000.0

    found = price_of_throughput(problem, floor, min(plans)[0])

    dearer = min(cost for cost, fast in plans if fast >= floor)
    assert found.extra_usd == pytest.approx(dearer - min(plans)[0])
    assert found.highest_samples_per_s is None


def test_a_throughput_out_of_reach_names_the_highest():
    problem = tiny_problem(0)

    found = price_of_throughput(problem, 1e9, 1.0)

    assert (found.extra_usd, found.stages) == (None, ())
    fastest = max(fast for _, fast in costs_and_throughputs(problem))
    assert found.highest_samples_per_s == pytest.approx(fastest, rel=1e-4)


def test_changes_are_the_ends_the_plan_and_where_the_placement_is_new():
    problem = tiny_problem(1)
    stages = find_optimum(problem).stages
    front = sweep_front(problem, stages)

    shown = placement_changes(front, stages)

    assert (shown[0], shown[-1]) == (front[0], front[-1])
    assert stages in [point.stages for point in shown]
    hidden = [index for index, point in enumerate(front) if point not in shown]
    assert all(placement_of(front[index].stages) == placement_of(front[index - 1].stages) for index in hidden)
