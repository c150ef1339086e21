from dataclasses import replace

import pytest

from heterps_core.planning.calibration.correction import NO_CORRECTION
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.plans.scheduling_plan import Stage
from infra.workspace import Workspace
from tasks.learning import Learning, learn_from_runs
from tests.tasks.builders import make_problem, make_result
from tests.tasks.report_builders import RUN_ID, make_plan_report, make_run_report, make_speed

NIGHTS = [f"202610{day:02d}-0230-00000000" for day in range(1, 13)]
LAUNCHED = (Stage(0, 0, "cpu-c7i", 1), Stage(1, 2, "gpu-t4", 1))


def learnt_from(**changes):
    return Learning(speeds=tuple(make_speed(night, **changes) for night in NIGHTS))


def test_a_dry_run_is_corrected_by_earlier_dry_runs_on_this_machine_alone():
    learning = learnt_from()

    here = learning.of_step(LAUNCHED, hardware="machine", model="tiny")
    elsewhere = learning.of_step(LAUNCHED, hardware="another machine", model="tiny")

    # By hand: all nights took 25 ms where 20 ms were predicted.
    assert here.factor == pytest.approx(1.25)
    assert elsewhere == NO_CORRECTION


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
    assert "cpu-c7i 1.250, gpu-t4 1.250" in rented.summary(problem)
    assert Learning().summary(problem).startswith("speeds of past runs: 0")


def test_waits_between_stages_lengthen_the_next_plan_too():
    problem = make_problem()
    stages = make_result(problem).plan.stages
    rented = learnt_from(hardware="cpu-c7i | gpu-t4", is_dry_run=False)
    waiting = Learning(speeds=tuple(replace(speed, measured_step_seconds=0.030) for speed in rented.speeds))

    before, after = evaluate(problem, stages), evaluate(waiting.corrected(problem), stages)

    # By hand: stages of 20 ms took 25 ms, and the steps 30 ms.
    assert before.throughput_samples_per_s / after.throughput_samples_per_s == pytest.approx(30 / 20)
    assert "waits between stages 1.200" in waiting.summary(problem)


def test_a_run_of_which_a_stage_does_not_tell_teaches_nothing_about_waits():
    speed = make_speed(NIGHTS[0], is_dry_run=False)
    silent = replace(speed, stages=(replace(speed.stages[0], measured_seconds=None), speed.stages[1]))

    assert speed.waits is not None
    assert silent.waits is None


def test_what_a_rented_run_tells_is_free_of_the_correction_that_it_was_planned_with():
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
    assert learn_from_runs.fn(Workspace(root=tmp_path), run_id=RUN_ID) == Learning()
    assert list(tmp_path.iterdir()) == []
