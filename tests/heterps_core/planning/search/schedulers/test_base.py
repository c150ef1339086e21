import pytest

from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.schedulers import get_scheduler
from tests.builders import make_problem

PROBLEM = make_problem(4, num_layers=5, num_types=3, floor_samples_per_s=5_000)


def search_with_bound(proven_usd):
    return get_scheduler("genetic").search(PROBLEM, budget_evaluations=2_000, seed=0, proven_usd=proven_usd)


def test_a_plan_below_the_proven_bound_is_a_defect_and_is_not_hidden():
    with pytest.raises(AssertionError, match=r"but genetic found one of .* defect of the planner"):
        search_with_bound(find_optimum(PROBLEM).cost_usd * 1.001)


def test_a_bound_that_differs_by_rounding_alone_is_the_cost():
    assert search_with_bound(find_optimum(PROBLEM).cost_usd * (1 + 1e-14)).plan.optimality_gap == 0
