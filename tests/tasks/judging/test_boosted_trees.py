"""LightGBM beside a model: its target means against a loop, its limits, and the line that says who is better."""

import numpy as np
import pytest

from heterps_core.data.features import NO_ID, FeatureSpec
from heterps_core.data.row_arrays import RowArrays
from heterps_core.errors import ConfigurationError
from heterps_core.judging.quality import ClickQuality, roc_auc
from tasks.judging import boosted_trees as module
from tasks.judging.baseline import Baseline
from tasks.judging.boosted_trees import PRIOR_ROWS, boosted_trees, target_means
from tasks.reports.report_text import _beside_trees
from tests.tasks.report_builders import make_run_report

FEATURES = FeatureSpec(num_dense=1, slot_rows=(2_000, 10), slot_lengths=(1, 1))


def made_rows(num_rows, *, seed):
    """Rows whose click depends on the value of a wide column alone, half of which are seldom clicked."""
    generator = np.random.default_rng(seed)
    ids = np.column_stack([generator.integers(1, 200, num_rows), generator.integers(1, 10, num_rows)])
    labels = generator.random(num_rows) < np.where(ids[:, 0] % 2, 0.8, 0.2)
    dense = generator.normal(size=(num_rows, 1)).astype(np.float32)
    return RowArrays(dense=dense, ids=ids.astype(np.int32), labels=labels.astype(np.uint8))


def test_a_mean_is_that_of_earlier_rows_with_the_value():
    generator = np.random.default_rng(0)
    ids = generator.integers(NO_ID, 6, (60, 3))
    counts = generator.integers(0, 3, 60).astype(float)
    clicks = generator.integers(0, 2, 60) * counts

    found = target_means(ids, clicks, counts)

    for row in range(60):
        rate = (clicks[:row].sum() + 1) / (counts[:row].sum() + 2)
        means = []
        for value in ids[row][ids[row] != NO_ID]:
            earlier = [(other, number) for other in range(row) for number in ids[other] if number == value]
            seen_clicks, seen = (sum(of[other] for other, _ in earlier) for of in (clicks, counts))
            means.append((seen_clicks + PRIOR_ROWS * rate) / (seen + PRIOR_ROWS))
        assert found[row] == pytest.approx(np.mean(means) if means else rate)


def test_trees_learn_a_wide_column_by_its_means_and_rate_later_rows():
    train, rated = made_rows(4_000, seed=0), made_rows(2_000, seed=1)

    logits = boosted_trees(FEATURES, train, rated)

    best = roc_auc(rated.labels, (rated.ids[:, 0] % 2).astype(float))
    assert roc_auc(rated.labels, logits) > best - 0.03
    assert (1 / (1 + np.exp(-logits))).mean() == pytest.approx(rated.labels.mean(), abs=0.05)


def test_a_search_that_is_out_of_time_ends_with_its_best_trees(monkeypatch):
    monkeypatch.setattr(module, "MOST_SECONDS", 0.0)

    logits = boosted_trees(FEATURES, made_rows(2_000, seed=0), made_rows(500, seed=1))

    # One tree of 31 leaves.
    assert 1 < len(np.unique(logits)) <= 31


def test_too_few_rows_are_refused_in_one_line():
    with pytest.raises(ConfigurationError, match="LightGBM needs at least 1,000 training rows, got 300"):
        boosted_trees(FEATURES, made_rows(300, seed=0), made_rows(10, seed=1))


@pytest.mark.parametrize(
    ("auc", "log_loss", "expected"),
    [
        (0.7532, 0.4912, "LightGBM is better by 0.0100 AUC and 0.0100 nats, in 19.5 processor seconds; try "),
        (
            0.6900,
            0.5200,
            " is better than LightGBM by 0.0532 AUC and 0.0188 nats; LightGBM in 19.5 processor",
        ),
        (0.7632, 0.5212, "LightGBM has +0.0200 AUC and +0.0200 nats of log-loss, in 19.5 processor seconds"),
    ],
)
def test_a_line_says_who_is_better_by_how_much_and_at_what_cost(auc, log_loss, expected):
    trees = Baseline(
        quality=ClickQuality(auc=auc, log_loss=log_loss, num_rows=500),
        num_train_rows=4_000,
        logits=np.zeros(500),
        rated_runs=(),
        processor_seconds=19.5,
    )
    report = make_run_report(trees=trees)

    line = _beside_trees(report)

    assert (report.quality.auc, report.quality.log_loss) == (0.7432, 0.5012)
    assert expected in line
    assert report.metrics()["quality/lightgbm_auc"] == auc
