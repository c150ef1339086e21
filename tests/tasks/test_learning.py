from dataclasses import replace

import pytest

from heterps_core.planning.calibration import Calibration, Correction
from heterps_core.planning.cost_model.evaluation import evaluate
from infra.workspace import Workspace
from tasks.profiling import learn_from_runs
from tests.tasks.builders import make_problem, make_result
from tests.tasks.report_builders import RUN_ID, make_plan_report, make_run_report, make_speed

NIGHTS = [f"202610{day:02d}-0230-00000000" for day in range(1, 13)]


def learnt_from(**changes):
    return Calibration(tuple(make_speed(night, **changes) for night in NIGHTS))


def test_a_dry_run_is_corrected_by_earlier_dry_runs_on_this_machine_alone():
    learning = learnt_from()

    # By hand: all nights took 25 ms where 20 ms were predicted.
    assert learning.correction("machine", model="tiny") == Correction(pytest.approx(1.25), len(NIGHTS))
    assert learning.correction("another machine", model="tiny") == Correction()


def test_dry_runs_teach_nothing_about_device_types_that_were_not_there():
    problem = make_problem()

    assert learnt_from().corrected(problem) is problem


def test_the_plan_is_made_with_what_rented_runs_have_shown():
    problem = make_problem()
    stages = make_result(problem).plan.stages
    rented = learnt_from(hardware="cpu-c7i | gpu-t4", is_dry_run=False)

    corrected = rented.corrected(problem)

    before, after = evaluate(problem, stages), evaluate(corrected, stages)
    assert after.throughput_samples_per_s == pytest.approx(before.throughput_samples_per_s / 1.25)
    assert "cpu-c7i 1.250, the median of 12 past runs; gpu-t4 1.250" in rented.summary(problem)
    assert Calibration().summary(problem) == "no calibration: profile times used unchanged"


def test_the_record_of_a_rented_run_is_free_of_the_correction_that_it_was_planned_with():
    problem = make_problem()
    rented = learnt_from(hardware="cpu-c7i | gpu-t4", is_dry_run=False)
    plain = make_plan_report(provider="aws")
    corrected = rented.corrected(problem)
    planned = replace(
        plain, problem=corrected, searches=replace(plain.searches, results={"exact": make_result(corrected)})
    )

    speed = make_run_report(planned=planned, learning=rented).speed

    before = evaluate(problem, plain.chosen.plan.stages)
    assert [stage.predicted_seconds for stage in speed.stages] == pytest.approx(
        [part.seconds for part in before.stages]
    )
    assert speed.correction_factor == pytest.approx(1.25)


def test_without_a_record_nothing_is_learnt_and_nothing_is_written(tmp_path):
    assert learn_from_runs.fn(Workspace(root=tmp_path), run_id=RUN_ID) == Calibration()
    assert list(tmp_path.iterdir()) == []
