from dataclasses import replace

import pytest

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.explain.changes import price_of_floor, price_of_throughput
from heterps_core.planning.explain.explanation import Detail, explain_plan
from heterps_core.planning.problem.extra_costs import ExtraCosts
from heterps_core.planning.search.optimum import find_optimum, highest_throughput
from tests.heterps_core.planning.explain.trying_all import (
    cheapest_by_trying_all,
    feasible_plans,
    tiny_problem,
)
from tests.tiers import weekly_after


def costs_and_throughputs(problem):
    """(cost, throughput) of every plan, the floor left aside."""
    unfloored = replace(problem, throughput_floor_samples_per_s=0.0)
    return [
        (cost, evaluate(unfloored, stages).throughput_samples_per_s)
        for _, stages, cost in feasible_plans(unfloored)
    ]


@pytest.mark.parametrize("seed", weekly_after(1, range(4)))
def test_the_highest_throughput_is_that_of_all_plans(seed):
    problem = tiny_problem(seed)

    fastest = max(fast for _, fast in costs_and_throughputs(problem))

    assert highest_throughput(problem) == pytest.approx(fastest, rel=1e-4)


def test_more_throughput_costs_the_difference_to_the_cheapest_plan_above_it():
    problem = tiny_problem(0)
    plans = costs_and_throughputs(problem)
    floor = 12_000.0

    found = price_of_throughput(problem, floor, min(plans)[0])

    costlier = min(cost for cost, fast in plans if fast >= floor)
    assert found.extra_usd == pytest.approx(costlier - min(plans)[0])
    assert found.highest_samples_per_s is None


def test_a_throughput_out_of_reach_names_the_highest():
    problem = tiny_problem(0)

    found = price_of_throughput(problem, 1e9, 1.0)

    assert (found.extra_usd, found.stages) == (None, ())
    fastest = max(fast for _, fast in costs_and_throughputs(problem))
    assert found.highest_samples_per_s == pytest.approx(fastest, rel=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_of_free_units_the_cheapest_plan_is_the_fastest_so_no_more_throughput_is_searched(seed):
    problem = tiny_problem(seed)
    free = {
        name: replace(unit, price_usd_per_hour=0.0, interruptions_per_hour=0.0)
        for name, unit in problem.device_types.items()
    }
    problem = replace(problem, device_types=free, extra_costs=ExtraCosts(storage_usd_per_hour=1e-6))

    more = explain_plan(problem, find_optimum(problem).stages, detail=Detail.SHORT).ten_percent_more

    fastest = max(fast for _, fast in costs_and_throughputs(problem))
    assert (more.extra_usd, more.stages) == (None, ())
    assert more.floor_samples_per_s == pytest.approx(1.1 * fastest)
    assert more.highest_samples_per_s == pytest.approx(fastest)


@pytest.mark.parametrize("seed", weekly_after(2, range(6)))
def test_the_floor_costs_what_the_cheapest_plan_without_it_saves(seed):
    problem = tiny_problem(seed, floor_samples_per_s=9_000.0)
    cheapest = cheapest_by_trying_all(problem)
    _, stages, unfloored_usd = cheapest_by_trying_all(replace(problem, throughput_floor_samples_per_s=0.0))

    found = price_of_floor(problem, cheapest[2])

    if unfloored_usd == pytest.approx(cheapest[2], rel=1e-9):
        assert found is None
    else:
        assert found.saving_usd == pytest.approx(cheapest[2] - unfloored_usd, rel=1e-9)
        assert found.stages == stages


def test_no_floor_costs_nothing():
    problem = tiny_problem(1, floor_samples_per_s=0.0)

    assert price_of_floor(problem, cheapest_by_trying_all(problem)[2]) is None
