import pytest

from heterps_core.planning.explain.placement import moves_between
from heterps_core.planning.explain.reasons import FARTHEST_FACTOR, find_runner_up
from heterps_core.planning.search.optimum import find_optimum
from tests.heterps_core.planning.explain.trying_all import (
    feasible_plans,
    placement_of,
    tiny_problem,
    with_all_costs,
)
from tests.tiers import weekly_after


@pytest.mark.parametrize("floor_samples_per_s", [0.0, 2_000.0, 20_000.0])
@pytest.mark.parametrize("seed", weekly_after(1, range(4)))
def test_is_the_cheapest_of_all_plans_with_another_placement(seed, floor_samples_per_s):
    problem = tiny_problem(seed, floor_samples_per_s=floor_samples_per_s)
    plans = feasible_plans(problem)
    optimum = find_optimum(problem)
    others = [cost for placement, _, cost in plans if placement != placement_of(optimum.stages)]

    found = find_runner_up(problem, optimum.stages, optimum.cost_usd)

    if not others or min(others) > FARTHEST_FACTOR * optimum.cost_usd:
        assert found is None
    else:
        assert found.cost_usd == pytest.approx(min(others), rel=1e-12)
        assert found.extra_usd == pytest.approx(min(others) - optimum.cost_usd, rel=1e-9, abs=1e-12)
        assert found.moves == moves_between(optimum.stages, found.stages) != ()


@pytest.mark.parametrize("seed", weekly_after(1, range(3)))
def test_all_costs_are_in_it(seed):
    problem = with_all_costs(tiny_problem(seed))
    optimum = find_optimum(problem)
    others = [
        cost for placement, _, cost in feasible_plans(problem) if placement != placement_of(optimum.stages)
    ]

    found = find_runner_up(problem, optimum.stages, optimum.cost_usd)

    assert found.cost_usd == pytest.approx(min(others), rel=1e-12)


def test_there_is_none_with_a_single_device_type():
    problem = tiny_problem(1, num_types=1, max_units=50, floor_samples_per_s=0.0)
    optimum = find_optimum(problem)

    assert find_runner_up(problem, optimum.stages, optimum.cost_usd) is None
