import pytest

from heterps_core.planning.calibration.correction import corrected_problem
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem


def test_every_stage_on_a_corrected_type_takes_so_much_longer_and_others_do_not():
    problem = make_problem(4, num_layers=6, num_types=3)
    cpu, gpu = problem.device_type_names[:2]
    stages = (Stage(0, 2, cpu, 3), Stage(3, 5, gpu, 2))
    before = evaluate(problem, stages)

    after = evaluate(corrected_problem(problem, {cpu: 1.4, "not in the problem": 9.0}), stages)

    for name in ("compute_seconds", "communication_seconds", "seconds"):
        assert getattr(after.stages[0], name) == pytest.approx(1.4 * getattr(before.stages[0], name))
        assert getattr(after.stages[1], name) == pytest.approx(getattr(before.stages[1], name))
    assert after.price_usd_per_hour == before.price_usd_per_hour


def test_without_corrections_the_problem_is_the_same_object():
    problem = make_problem(4, num_layers=6, num_types=3)

    assert corrected_problem(problem, {}) is problem
    assert corrected_problem(problem, {problem.device_type_names[0]: 1.0}) is problem
