"""Machines that are owned or reserved cost nothing: plans take them, and every proof and sentence stays a number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.explain.explanation import default_detail, explain_plan
from heterps_core.planning.explain.text import explanation_text
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.schedulers import SCHEDULERS, get_scheduler
from tests.heterps_core.planning.explain.trying_all import feasible_plans, tiny_problem, with_all_costs


def with_free(problem: SchedulingProblem, num_free: int) -> SchedulingProblem:
    """The same problem where the first device types, with all their sizes, cost nothing."""
    free = list(problem.device_types)[:num_free]
    units = {
        name: replace(
            unit,
            price_usd_per_hour=0.0,
            instances=tuple(replace(size, price_usd_per_hour=0.0) for size in unit.instances),
        )
        if name in free
        else unit
        for name, unit in problem.device_types.items()
    }
    return replace(problem, device_types=units)


@pytest.mark.parametrize("step_model", StepModel)
@pytest.mark.parametrize("has_all_costs", [False, True])
@pytest.mark.parametrize("num_free", [1, 2])
def test_the_cheapest_plan_with_free_machines_is_that_of_trying_all(num_free, has_all_costs, step_model):
    problem = tiny_problem(1, num_layers=2, num_types=2, max_units=3)
    problem = with_free(with_all_costs(problem) if has_all_costs else problem, num_free)
    problem = replace(problem, step_model=step_model)
    expected = min(cost for _, _, cost in feasible_plans(problem))

    found = find_optimum(problem)

    # Searches take a free unit for one of a nano-USD an hour.
    assert found.cost_usd == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert found.cost_lower_bound_usd == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert found.cost_lower_bound_usd <= found.cost_usd


@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_every_search_plans_where_all_machines_are_free(scheduler):
    problem = replace(
        with_free(tiny_problem(1, num_layers=3, num_types=2, max_units=3), 2),
        throughput_floor_samples_per_s=0.0,
    )

    found = get_scheduler(scheduler).search(problem, budget_evaluations=32, seed=0)

    assert (found.plan.cost_usd, found.plan.cost_lower_bound_usd, found.plan.optimality_gap) == (
        0.0,
        0.0,
        0.0,
    )
    assert evaluate(problem, found.plan.stages).throughput_samples_per_s > 0


@pytest.mark.parametrize("num_free", [1, 2])
def test_a_plan_with_free_machines_is_explained(num_free):
    problem = with_free(tiny_problem(1, num_layers=2, num_types=2, max_units=3), num_free)
    stages = find_optimum(problem).stages

    explanation = explain_plan(problem, stages, detail=default_detail(problem))

    text = explanation_text(explanation)
    assert "nan" not in text
    assert "inf" not in text
