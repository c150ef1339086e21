import pytest

from heterps_core.planning.search.optimum import find_optimum
from tasks.planning.problems import with_enough_units
from tests.tasks.builders import make_problem


@pytest.mark.parametrize(("floor_samples_per_s", "units"), [(50_000.0, 64), (200_000.0, 256), (1e9, 1_024)])
def test_more_units_of_a_type_are_planned_with_where_no_plan_does_with_fewer(floor_samples_per_s, units):
    # By hand: a unit of either type works at most 1,250 samples/s, 64 of both together 160,000.
    problem = with_enough_units(make_problem(throughput_floor_samples_per_s=floor_samples_per_s), {})

    assert {unit.max_units for unit in problem.device_types.values()} == {units}
    if units < 1_024:
        assert find_optimum(problem).cost_lower_bound_usd == find_optimum(problem).cost_usd


def test_no_type_is_planned_with_more_units_than_the_account_may_rent():
    problem = make_problem(throughput_floor_samples_per_s=50_000.0)
    first, *others = problem.device_types

    limited = with_enough_units(problem, {first: 3}).device_types

    assert limited[first].max_units == 3
    assert all(limited[name].max_units > 3 for name in others)
