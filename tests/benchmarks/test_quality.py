"""The streams on which a part of a model must pay: their truth is what the rows say, and the parts are needed."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.benchmarks.quality import quality_of_models, train
from tests.benchmarks.quality_streams import (
    HISTORY_LENGTH,
    NUM_TOPICS,
    STRENGTH,
    history_stream,
    two_label_stream,
)

pytestmark = pytest.mark.slow

NUM_ROWS = 4_000


def test_clicks_follow_what_the_history_says_of_the_candidates_topic_alone(tmp_path):
    stream = history_stream(tmp_path / "rows", num_rows=NUM_ROWS, seed=0)

    rows = pq.read_table(tmp_path / "rows" / "rows.parquet").to_pylist()
    assert len(rows) == NUM_ROWS
    assert len({row["topic"] for row in rows}) == NUM_TOPICS
    by_mean: dict[float, list[int]] = {}
    for row in rows:
        topic = row["topic"].removeprefix("topic ")
        own = [text.split()[1] for text in row["history"] if text.split()[0] == topic]
        assert 1 <= len(own) <= 3 < len(row["history"]) == HISTORY_LENGTH
        by_mean.setdefault(own.count("liked") / len(own) * 2 - 1, []).append(row["click"])
    for mean, clicks in by_mean.items():
        expected = 1 / (1 + np.exp(-STRENGTH * mean))
        assert np.mean(clicks) == pytest.approx(expected, abs=4 * np.sqrt(0.25 / len(clicks)))
    assert stream.best.auc > stream.without.auc + 0.1
    assert stream.without.auc > 0.55


def test_two_labels_have_the_same_rows_whichever_are_asked_for(tmp_path):
    for labels in (("click", "buy"), ("buy",)):
        two_label_stream(tmp_path / labels[0], labels, num_rows=NUM_ROWS, seed=0)

    both, alone = (pq.read_table(tmp_path / name / "rows.parquet") for name in ("click", "buy"))
    assert both.drop_columns("click").equals(alone)
    rates = [np.mean(both[name].to_numpy()) for name in ("click", "buy")]
    assert 0.25 < rates[0] < 0.4
    assert 0.05 < rates[1] < 0.15


def test_a_file_of_rows_is_trained_beside_a_logistic_regression(tmp_path):
    from heterps_core.data.synthetic.click_stream import write_click_stream

    write_click_stream(tmp_path / "clicks.tsv", num_rows=NUM_ROWS, seed=0)

    figures = quality_of_models(["lr"], range(2), str(tmp_path / "clicks.tsv"))

    values = {each["name"]: each["value"] for each in figures}
    assert values.keys() == {
        f"{name}_{what}"
        for name in ("logistic_regression", "lr")
        for what in ("auc", "auc_deviation", "log_loss")
    } | {"lr_processor_seconds"} | {
        f"lr_{what}_bfloat16_less_float32{end}" for what in ("auc", "log_loss") for end in ("", "_deviation")
    }
    assert 0.55 < values["lr_auc"] < 0.82
    assert 0.55 < values["logistic_regression_auc"] < 0.82


def test_the_spread_is_that_of_the_seeds(tmp_path):
    stream = two_label_stream(tmp_path / "rows", ("click",), num_rows=NUM_ROWS, seed=0)

    trained = train(stream.dataset, "lr", range(3))

    aucs = [quality.auc for quality in trained.qualities]
    assert trained.spread("auc") == pytest.approx((np.mean(aucs), np.std(aucs, ddof=1)))
    assert trained.qualities[1:] == train(stream.dataset, "lr", range(1, 3)).qualities
