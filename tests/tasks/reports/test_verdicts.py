import math
from dataclasses import replace

import numpy as np
import pytest

from heterps_core.judging.quality import roc_auc
from tasks.records.mlflow_names import DATA_TAG, DAY_TAG
from tasks.reports.verdicts import answers_of, auc_standard_error, night_before
from tests.tasks.report_builders import make_night, make_run_report
from tests.tasks.reports.test_run_document import make_decision


def remarks(last, *, decision="it is a test"):
    return [answer.remark for answer in answers_of(make_run_report(), decision, last)]


def night_with(**metrics):
    night = make_night(0)
    return replace(night, metrics={**night.metrics, **metrics})


def test_each_figure_is_told_with_its_change_and_a_verdict():
    # The run: 2.25 USD for a million samples, 4,000 samples/s, AUC 0.7432.
    last = night_with(
        **{
            "cost/billed_usd_per_million_samples": 2.0,
            "measured/undisturbed_throughput_samples_per_s": 3_200.0,
            "quality/auc": 0.6,
        }
    )

    cost, speed, auc, _ = remarks(last)

    assert cost == (
        "billed (dry run here at list prices, nothing is charged); promised 0.000883 USD (planned machines, "
        "a night of 36,000 samples); more expensive, +12.5% since 2026-10-01"
    )
    assert speed == (
        "measured (dry run here); promised 10,000 samples/s (planned machines, a night of 36,000 samples); "
        "faster, +25.0% since 2026-10-01"
    )
    assert auc.startswith("better, +0.1432 since 2026-10-01")


def test_a_small_change_is_no_verdict():
    last = night_with(**{"cost/billed_usd_per_million_samples": 2.3, "quality/auc": 0.75})

    cost, _, auc, _ = remarks(last)

    assert "about the same, -2.2%" in cost
    assert auc.startswith("no clear change, -0.0068")


def test_without_a_night_before_nothing_is_compared():
    assert sum("no night before to compare with" in remark for remark in remarks(None)) == 3


@pytest.mark.parametrize(
    ("decision", "answer"),
    [
        ("the data has no days", ("not judged", "the data has no days")),
        (make_decision(is_promoted=True), ("yes", "It keeps every bound.")),
        (make_decision(is_promoted=False), ("no", "It keeps every bound.")),
    ],
)
def test_the_champion_is_told_with_the_reason(decision, answer):
    assert answers_of(make_run_report(), decision, None)[-1][1:] == answer


def test_the_night_before_is_the_last_day_of_the_same_model_and_data_that_finished():
    first, second, third, other, failed, current = (make_night(index) for index in range(6))
    other = replace(other, tags={**other.tags, DATA_TAG: "elsewhere"})
    failed = replace(failed, status="FAILED")
    back_filled = replace(make_night(7), tags={**make_night(7).tags, DAY_TAG: "2026-10-02"})
    nights = [first, second, third, other, failed, current, back_filled]

    assert night_before(nights, current.run_id) == third
    assert night_before(nights, back_filled.run_id) == second
    assert night_before(nights, first.run_id) is None


def test_the_standard_error_of_an_auc_is_that_of_many_samples():
    random, num_clicks, num_others = np.random.default_rng(0), 60, 140
    labels = np.repeat([1.0, 0.0], [num_clicks, num_others])
    found = []
    for _ in range(2_000):
        scores = np.concatenate([random.exponential(3.0, num_clicks), random.exponential(1.0, num_others)])
        found.append(roc_auc(labels, scores))

    # The formula holds for exponential scores, for which the AUC is 3/4.
    assert np.mean(found) == pytest.approx(0.75, abs=0.005)
    expected = auc_standard_error(0.75, num_clicks=num_clicks, num_others=num_others)
    assert expected == pytest.approx(np.std(found), rel=0.06)
    assert math.isfinite(auc_standard_error(1.0, num_clicks=1, num_others=1))
