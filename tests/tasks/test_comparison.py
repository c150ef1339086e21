import pytest

from heterps_core.errors import ConfigurationError, InfeasiblePlanError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.search.optimum import find_optimum
from tasks.comparison import _reason_in_one_line, _with_floor_and_caps, load_problems
from tests.builders import make_problem as make_random_problem


def test_with_floor_and_caps_the_cheapest_plan_is_forbidden_and_others_are_left():
    problem = make_random_problem(0, num_layers=6, num_types=3)
    cheapest = find_optimum(problem)

    bound = _with_floor_and_caps(problem)

    assert evaluate(bound, cheapest.stages).violations
    throughput = evaluate(bound, find_optimum(bound).stages).throughput_samples_per_s
    assert throughput >= bound.throughput_floor_samples_per_s * (1 - 1e-9)


def test_reasons_are_one_line_without_the_way_out():
    missed_floor = InfeasiblePlanError("throughput floor", "10 samples/s, 99% below; raise max_units")

    assert _reason_in_one_line(missed_floor) == "no plan meets the throughput floor: 10 samples/s, 99% below"
    assert _reason_in_one_line(ValueError("a\nb")) == "failed: ValueError: a b"


def test_a_problem_file_that_cannot_be_used_is_named(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text("{}")

    with pytest.raises(ConfigurationError, match=r"problem\.json: schema_version: is missing"):
        load_problems([str(path)])
    with pytest.raises(ConfigurationError, match=r"cannot read .*none\.json"):
        load_problems([str(tmp_path / "none.json")])
