import json
from statistics import median

import numpy as np
import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.planning.calibration import (
    LEAST_RUNS,
    MOST_RUNS,
    Calibration,
    Correction,
    RunSpeed,
    StageSpeed,
    with_scaled_times,
)
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem


def make_speed(*ratios, is_dry_run=False, model="ctrdnn", hardware="machine"):
    """A run whose stages, on "cpu" and then "gpu", were predicted at 10 ms each and took so many times as long."""
    return RunSpeed(
        run_id="20261121-0230-00000001",
        model=model,
        hardware=hardware,
        is_dry_run=is_dry_run,
        predicted_step_seconds=0.010,
        correction_factor=1.0,
        measured_step_seconds=0.010 * max(ratio or 0.0 for ratio in ratios),
        stages=tuple(
            StageSpeed(
                device_type=name,
                num_replicas=1,
                predicted_seconds=0.010,
                measured_seconds=ratio and 0.010 * ratio,
            )
            for name, ratio in zip(("cpu", "gpu"), ratios, strict=False)
        ),
    )


def factor_after(ratios, hardware="cpu"):
    speeds = tuple(make_speed(ratio) for ratio in ratios)
    return Calibration(speeds).correction(hardware, model="ctrdnn").factor


def test_the_factor_is_the_median_of_the_last_runs():
    ratios = np.exp(np.random.default_rng(0).normal(0.2, 0.1, MOST_RUNS + 9)).tolist()

    assert factor_after(ratios) == pytest.approx(median(ratios[-MOST_RUNS:]))


def test_few_runs_correct_nothing_and_one_disturbed_run_moves_nothing():
    assert factor_after([1.4] * (LEAST_RUNS - 1)) == 1.0
    assert factor_after([1.2, 1.2, 9.0]) == pytest.approx(1.2)


def test_each_device_type_has_its_own_factor_and_a_stage_without_a_report_has_none():
    calibration = Calibration((make_speed(1.5, 0.5),) * LEAST_RUNS + (make_speed(1.5, None),) * LEAST_RUNS)

    assert calibration.correction("cpu", model="ctrdnn").num_runs == 2 * LEAST_RUNS
    assert calibration.correction("gpu", model="ctrdnn") == Correction(pytest.approx(0.5), LEAST_RUNS)


def test_other_models_machines_and_dry_runs_teach_nothing_about_a_device_type():
    calibration = Calibration(
        (make_speed(1.3, model="nce"),) * 5 + (make_speed(1.6, is_dry_run=True),) * 5,
    )

    assert calibration.correction("cpu", model="ctrdnn") == Correction()
    assert calibration.correction("elsewhere", model="ctrdnn") == Correction()
    assert calibration.correction("machine", model="ctrdnn").factor == pytest.approx(1.6)


def test_a_correction_says_from_how_many_runs_it_comes():
    assert str(Correction(1.0, 1)) == "not corrected: 1 of the 3 past runs that a correction needs"
    assert str(Correction(1.25, 12)) == "1.250, the median of 12 past runs"


def test_every_stage_on_a_corrected_type_takes_so_much_longer_and_others_do_not():
    problem = make_problem(4, num_layers=6, num_types=3)
    cpu, gpu = problem.device_type_names[:2]
    stages = (Stage(0, 2, cpu, 3), Stage(3, 5, gpu, 2))
    before = evaluate(problem, stages)

    after = evaluate(with_scaled_times(problem, {cpu: 1.4, "not in the problem": 9.0}), stages)

    for name in ("compute_seconds", "communication_seconds", "seconds"):
        assert getattr(after.stages[0], name) == pytest.approx(1.4 * getattr(before.stages[0], name))
        assert getattr(after.stages[1], name) == pytest.approx(getattr(before.stages[1], name))
    assert after.price_usd_per_hour == before.price_usd_per_hour


def test_without_corrections_the_problem_is_the_same_object():
    problem = make_problem(4, num_layers=6, num_types=3)

    assert with_scaled_times(problem, {}) is problem
    assert with_scaled_times(problem, {problem.device_type_names[0]: 1.0}) is problem


def test_a_speed_survives_json():
    speed = make_speed(1.2, None)

    assert RunSpeed.from_json(json.loads(json.dumps(speed.to_json()))) == speed


@pytest.mark.parametrize(
    ("spoilt", "rule"),
    [
        ({"schema_version": 9}, "schema_version: must be 1, got 9"),
        ({"stages": [{"device_type": "cpu-c7i"}]}, r"stages\[0\].num_replicas: is missing"),
        ({"measured_step_seconds": 0.0}, "measured_step_seconds: must be positive"),
        ({"predicted_step_seconds": float("inf")}, "predicted_step_seconds: must be a finite number"),
    ],
)
def test_a_damaged_record_is_refused_with_its_rule(spoilt, rule):
    with pytest.raises(ConfigurationError, match=rule):
        RunSpeed.from_json({**make_speed(1.2).to_json(), **spoilt})
