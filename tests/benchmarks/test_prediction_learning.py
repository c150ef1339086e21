import pytest

from heterps_core.data.features import FeatureSpec
from tests.benchmarks.prediction_error import draw_plans
from tests.benchmarks.prediction_learning import answer_of, figures_of

FEATURES = FeatureSpec(num_dense=3, slot_rows=(20, 30, 40))


def test_a_steady_error_is_reported_without_and_with_what_was_learnt():
    plans = draw_plans(FEATURES, num_plans=20, seed=1)
    answers = [
        answer_of(plan, index, predicted=1_250.0, measured=1_000.0) for index, plan in enumerate(plans)
    ]

    figures = {entry["name"]: entry["value"] for entry in figures_of(answers)}

    # By hand: every step took a quarter longer; the first five nights are never corrected.
    assert figures["step_time_error_mean_without_learning"] == pytest.approx(0.25)
    assert figures["step_time_error_median_with_learning"] == pytest.approx(0.0)
    assert figures["step_time_error_worst_with_learning"] == pytest.approx(0.25)
