import json

import pytest

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.explain.explanation import Detail, default_detail, explain_plan
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem
from tests.heterps_core.planning.explain.trying_all import cheapest_by_trying_all, tiny_problem


def test_the_cheapest_plan_is_explained_and_the_chosen_ones_distance_reported():
    problem = tiny_problem(0)
    _, cheapest, cost_usd = cheapest_by_trying_all(problem)
    expensive = (Stage(0, 2, "gpu_a", 4),)

    explanation = explain_plan(problem, expensive, detail=Detail.SHORT)

    assert explanation.stages == cheapest
    assert explanation.chosen_extra_usd == pytest.approx(evaluate(problem, expensive).cost_usd - cost_usd)
    assert explanation.chosen_moves[0].from_type == "gpu_a"


def test_a_chosen_plan_that_costs_as_little_is_the_explained_one():
    problem = make_problem(0, num_layers=6, num_types=3)
    stages = find_optimum(problem).stages

    explanation = explain_plan(problem, stages, detail=Detail.SHORT)

    assert (explanation.stages, explanation.chosen_extra_usd, explanation.chosen_moves) == (stages, 0.0, ())
    # 1e8 samples.
    assert explanation.usd_per_million_samples == pytest.approx(explanation.cost_usd / 100)


@pytest.mark.parametrize("detail", Detail)
def test_json_holds_every_part_and_only_finite_numbers(detail):
    problem = make_problem(1, num_layers=6, num_types=3, scarce=True)

    explanation = explain_plan(problem, find_optimum(problem).stages, detail=detail)

    document = json.loads(json.dumps(explanation.to_json(), allow_nan=False))
    assert (document["schema_version"], document["detail"]) == (5, detail.value)
    is_full = detail is Detail.FULL
    assert (document["runner_up"] is not None) == is_full
    assert len(document["price_flips"]) == is_full


def test_small_problems_are_explained_in_full_and_large_ones_are_not():
    assert default_detail(make_problem(0, num_layers=32, num_types=4)) is Detail.FULL
    assert default_detail(make_problem(0, num_layers=100, num_types=10)) is Detail.SHORT
