"""Each gate at and beside its bound, with figures made up by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterps_core.judging.intervals import Estimate
from tasks.judging.promotion_gates import (
    ModelFigures,
    PromotionGates,
)

GATES = PromotionGates(
    min_auc_gain=-0.001,
    max_log_loss_increase=0.002,
    max_calibration_increase=0.1,
    max_cost_ratio=1.5,
)


def around(value, half_width=0.0005):
    return Estimate(value=value, low=value - half_width, high=value + half_width)


def figures(*, calibration_ratio=1.0, usd=1.0, planned_usd=None):
    return ModelFigures(
        auc=0.75,
        log_loss=0.45,
        calibration_ratio=calibration_ratio,
        usd_per_million_samples=usd,
        planned_usd_per_million_samples=planned_usd,
    )


def missed(*, auc=0.0, log_loss=0.0, challenger=None, champion=None, knows_newer_day=True, gates=GATES):
    verdicts = gates.against_champion(
        around(auc),
        around(log_loss),
        challenger=challenger or figures(),
        champion=champion or figures(),
        knows_newer_day=knows_newer_day,
    )
    return [verdict.name.partition(",")[0] for verdict in verdicts if not verdict.is_met]


def test_an_equal_model_passes():
    assert missed() == []


@pytest.mark.parametrize(("auc", "expected"), [(-0.0004, []), (-0.0006, ["AUC difference"])])
def test_the_lower_end_of_the_auc_difference_counts(auc, expected):
    assert missed(auc=auc) == expected


@pytest.mark.parametrize(
    ("auc", "min_auc_gain", "expected"),
    [
        (0.0006, -0.001, []),
        (0.0005, -0.001, ["AUC difference"]),  # The lower end is 0.
        (0.0016, 0.001, []),
        (0.0014, 0.001, ["AUC difference"]),
    ],
)
def test_a_model_that_knows_no_newer_day_must_be_proven_better(auc, min_auc_gain, expected):
    gates = replace(GATES, min_auc_gain=min_auc_gain)

    assert missed(auc=auc, knows_newer_day=False, gates=gates) == expected


@pytest.mark.parametrize(
    ("difference", "is_met", "remark"),
    [
        (0.0006, True, "difference +0.00060, 95% interval from +0.00010"),
        (-0.0004, True, "difference -0.00040, 95% interval from -0.00090, below it but not proven so"),
        # The upper end is 0.
        (-0.0005, True, "difference -0.00050, 95% interval from -0.00100, below it but not proven so"),
        (-0.0006, False, "difference -0.00060, 95% interval from -0.00110"),
    ],
)
def test_a_first_champion_must_not_be_proven_worse_than_the_logistic_regression(difference, is_met, remark):
    verdict = GATES.against_baseline(around(difference))

    assert (verdict.is_met, verdict.remark) == (is_met, remark)


def test_a_baseline_that_is_not_known_proves_nothing():
    verdict = GATES.against_baseline("there is none")

    assert not verdict.is_met
    assert str(verdict).endswith("must be at least 0, but is not known (there is none)")


@pytest.mark.parametrize(("log_loss", "expected"), [(0.0014, []), (0.0016, ["log-loss difference"])])
def test_the_upper_end_of_the_log_loss_difference_counts(log_loss, expected):
    assert missed(log_loss=log_loss) == expected


@pytest.mark.parametrize(
    ("challenger", "champion", "expected"),
    [
        (1.09, 1.0, []),
        (1.11, 1.0, ["calibration error"]),
        (0.89, 1.0, ["calibration error"]),
        # On a day on which everybody clicks less, both are too high.
        (1.35, 1.3, []),
        (0.85, 1.06, []),
    ],
)
def test_calibration_counts_beside_that_of_the_champion(challenger, champion, expected):
    assert (
        missed(challenger=figures(calibration_ratio=challenger), champion=figures(calibration_ratio=champion))
        == expected
    )


@pytest.mark.parametrize(
    ("usd", "champion_usd", "auc", "expected"),
    [
        (1.4, 1.0, 0.0, []),
        (1.6, 1.0, 0.0, ["cost over the champion's"]),
        (1.6, 1.0, 0.0006, []),
        (None, 1.0, 0.0, ["cost over the champion's"]),
        (1.0, None, 0.0, ["cost over the champion's"]),
        (None, None, 0.0006, []),
        (0.0, 0.0, 0.0, []),
        (0.1, 0.0, 0.0, ["cost over the champion's"]),
    ],
)
def test_what_costs_more_must_have_a_proven_gain(usd, champion_usd, auc, expected):
    assert missed(auc=auc, challenger=figures(usd=usd), champion=figures(usd=champion_usd)) == expected


@pytest.mark.parametrize(
    ("planned", "champion_planned", "expected"),
    [
        (1.0, 1.0, []),
        (1.6, 1.0, ["cost over the champion's"]),
        (1.0, None, ["cost over the champion's"]),  # Of a champion from before plans were kept: by the bills.
    ],
)
def test_a_busy_machine_that_doubles_the_bill_does_not_count_where_plans_are_known(
    planned, champion_planned, expected
):
    challenger, champion = (
        figures(usd=1.87, planned_usd=planned),
        figures(usd=1.0, planned_usd=champion_planned),
    )

    assert missed(challenger=challenger, champion=champion) == expected


@pytest.mark.parametrize(("difference", "is_met"), [(-0.0006, True), (-0.0004, False)])
def test_a_first_champion_must_be_better_than_the_mean_rate_beyond_doubt(difference, is_met):
    assert GATES.against_mean_rate(around(difference)).is_met is is_met


@pytest.mark.parametrize(("num_clicks", "is_met"), [(29, False), (30, True), (70, True), (71, False)])
def test_both_kinds_of_rows_must_be_there(num_clicks, is_met):
    assert PromotionGates().of_rows(num_rows=100, num_clicks=num_clicks).is_met is is_met


def test_a_verdict_reads_as_a_sentence():
    verdict = PromotionGates().of_rows(num_rows=1_000, num_clicks=7)

    assert str(verdict) == (
        "clicks, or rows without one must be at least 30, but is 7 (7 clicks in 1,000 rows)"
    )
