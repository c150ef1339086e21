from dataclasses import replace

import pytest

from heterps_core.planning.problem.scheduling_problem import StepModel
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.promising_types import MOST_TYPES, with_promising_types
from heterps_core.planning.search.schedulers import get_scheduler
from tests.builders import make_problem


def test_a_problem_of_few_types_stays_as_it_is():
    problem = make_problem(0, num_layers=6, num_types=MOST_TYPES)

    assert with_promising_types(problem) is problem


@pytest.mark.parametrize("seed", range(4))
def test_methods_that_propose_plans_find_good_ones_among_sixty_types(seed):
    problem = make_problem(seed, num_layers=6, num_types=60, max_units=64)
    cheapest = find_optimum(problem)

    few = with_promising_types(problem)

    assert len(few.device_types) == MOST_TYPES
    assert {*few.device_types} < {*problem.device_types}
    found = get_scheduler("genetic").search(problem, budget_evaluations=2_000, seed=0)
    assert cheapest.cost_usd <= found.plan.cost_usd < 1.25 * cheapest.cost_usd
    assert found.plan.cost_lower_bound_usd == pytest.approx(cheapest.cost_lower_bound_usd)


def test_types_that_hold_no_part_of_the_chain_are_not_promising():
    problem = make_problem(0, num_layers=4, num_types=20, max_units=2)
    names = problem.device_type_names
    units = {
        name: replace(unit, memory_bytes=1.0 if index % 2 else unit.memory_bytes * 1e3)
        for index, (name, unit) in enumerate(problem.device_types.items())
    }

    found = with_promising_types(replace(problem, device_types=units)).device_type_names

    assert {*found} <= {*names[::2]}


def test_the_chain_of_one_layer_has_promising_types_too():
    problem = make_problem(0, num_layers=1, num_types=30, max_units=64)

    assert len(with_promising_types(problem).device_types) == MOST_TYPES


def with_twins(problem):
    """Return the problem with a second type of the same figures beside each."""

    def doubled(values):
        return values | {f"{name} again": value for name, value in values.items()}

    layers = (
        replace(
            layer,
            compute_seconds=doubled(layer.compute_seconds),
            communication_seconds=doubled(layer.communication_seconds),
        )
        for layer in problem.layers
    )
    return replace(problem, layers=tuple(layers), device_types=doubled(problem.device_types))


def test_a_twin_of_a_type_makes_no_plan_cheaper_where_neighbouring_stages_may_share_a_type():
    problems = [
        make_problem(seed, num_layers=6, num_types=2, max_units=64, floor_samples_per_s=5_000)
        for seed in range(4)
    ]
    for problem in problems:
        trainers = replace(problem, step_model=StepModel.TRAINER)
        alone, twins = find_optimum(trainers), find_optimum(with_twins(trainers))

        assert twins.cost_usd == pytest.approx(alone.cost_usd, rel=1e-9)
    # By the papers' step they must differ.
    assert any(
        find_optimum(with_twins(each)).cost_usd < 0.99 * find_optimum(each).cost_usd for each in problems
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_of_some_types_is_cheaper_than_the_optimum_over_all(seed):
    problem = make_problem(seed, num_layers=6, num_types=20, max_units=64)
    cheapest = find_optimum(problem)
    used = {stage.device_type for stage in cheapest.stages}

    assert find_optimum(problem.of_types(used)).cost_usd == pytest.approx(cheapest.cost_usd, rel=1e-9)
    for first in range(0, 20, 5):
        some = problem.of_types(problem.device_type_names[first : first + 5])
        assert find_optimum(some).cost_usd >= cheapest.cost_usd * (1 - 1e-9)
