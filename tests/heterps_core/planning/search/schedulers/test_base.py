from dataclasses import replace

import pytest

from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.schedulers.base import result_with_bound
from tests.builders import make_problem

PROBLEM = make_problem(4, num_layers=5, num_types=3, floor_samples_per_s=5_000)


def certify(optimum):
    return result_with_bound(
        PROBLEM,
        optimum.cost_lower_bound_usd,
        scheduler="genetic",
        seed=0,
        stages=optimum.stages,
        num_evaluations=1,
        history=[],
        search_seconds=0.0,
        certificate_seconds=0.0,
    )


def test_a_plan_below_the_proven_bound_is_a_defect_and_is_not_hidden():
    optimum = find_optimum(PROBLEM)
    wrong = replace(optimum, cost_lower_bound_usd=optimum.cost_usd * 1.001)

    with pytest.raises(AssertionError, match=r"but genetic found one of .* defect of the planner"):
        certify(wrong)


def test_a_bound_that_differs_by_rounding_alone_is_the_cost():
    optimum = find_optimum(PROBLEM)
    rounded = replace(optimum, cost_lower_bound_usd=optimum.cost_usd * (1 + 1e-14))

    assert certify(rounded).plan.optimality_gap == 0
