import json
import math

import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.planning.calibration.run_speed import RunSpeed
from tests.heterps_core.planning.calibration.builders import make_speed


def test_a_speed_survives_json():
    speed = make_speed()

    assert RunSpeed.from_json(json.loads(json.dumps(speed.to_json()))) == speed


def test_the_answer_is_to_the_prediction_before_it_was_corrected():
    corrected, plain = make_speed(factor=1.3), make_speed()

    assert corrected.step == plain.step
    assert plain.step.log_ratio == pytest.approx(math.log(1.2))
    assert plain.step.path == ("cpu-c7i | gpu-t4", "ctrdnn", "2 + 1")


def test_only_rented_stages_that_were_measured_teach_about_device_types():
    [stage] = make_speed().rented_stages

    assert stage.path == ("cpu-c7i", "ctrdnn")
    assert stage.log_ratio == pytest.approx(math.log(1.25))
    assert make_speed(is_dry_run=True).rented_stages == ()


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
        RunSpeed.from_json({**make_speed().to_json(), **spoilt})
