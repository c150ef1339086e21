"""The logistic regression beside a model: what it learns, how many rows it reads, and what becomes of its failure."""

import sys
import tracemalloc
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from scipy.sparse import csr_matrix, random_array

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.reading import text_conversion
from heterps_core.data.row_groups import sampled_runs
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.judging.quality import measure_quality
from tasks.data import PreparedClicks
from tasks.judging import baseline
from tasks.judging.baseline import (
    LIGHTGBM,
    LOGISTIC_REGRESSION,
    SampledRows,
    _columns_of,
    _design_matrix,
    logistic_regression,
    measure_baseline,
    measure_baselines,
)
from tasks.reports.report_text import _baseline_remarks
from tests.heterps_core.data.synthetic_rows import held_out_labels
from tests.tasks.report_builders import make_run_report


def prepare(folder, *, num_rows, schema=CRITEO_SCHEMA):
    stream = write_click_stream(folder / "clicks.tsv", num_rows=num_rows, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_conversion, "ROWS_PER_GROUP", 600)
        dataset = prepare_dataset(
            str(stream.path), schema=schema, buckets_per_slot=256, out_dir=folder / "prepared"
        )
    return PreparedClicks(directory=str(dataset.directory), description="clicks", best_reachable=None)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("small"), num_rows=3_000)


@pytest.fixture(scope="module")
def many_clicks(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("large"), num_rows=30_000)


def measured(clicks):
    """Return the logistic regression alone."""
    return measure_baseline(logistic_regression, SampledRows.of(clicks.open()))


def peak_bytes(clicks):
    """Return the most that Python and NumPy hold at once for the baseline; mapped files are not counted."""
    tracemalloc.start()
    try:
        measured(clicks)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_design_matrix_is_dense_columns_and_one_hot_ids(clicks):
    dataset = clicks.open()
    rows = next(dataset.parts(10, 13))

    matrix = _design_matrix(rows, dataset.features).toarray()

    assert matrix.shape == (3, 13 + 26 * 256)
    np.testing.assert_array_equal(matrix[:, :13], rows.dense)
    for row, ids in zip(matrix[:, 13:], rows.ids, strict=True):
        np.testing.assert_array_equal(np.flatnonzero(row), ids + 256 * np.arange(26))


def test_it_learns_the_known_signal_from_all_rows_where_these_are_few(clicks):
    found = measured(clicks)

    assert found.num_train_rows == 2_400
    assert found.quality.num_rows == 600
    assert 0.6 < found.quality.auc < 0.82  # the stream's best reachable AUC is about 0.82
    assert found.quality == measure_quality(held_out_labels(clicks.open()), found.logits)


def test_it_promises_the_clicks_of_all_rows_where_it_was_fitted_on_a_share_of_those_without(tmp_path):
    clicks = prepare(tmp_path, num_rows=8_000, schema=replace(CRITEO_SCHEMA, negative_share=0.2))

    found = measured(clicks)

    labels = held_out_labels(clicks.open())
    assert "without a click left out, the latest 1,600 held out" in clicks.summary
    assert (1 / (1 + np.exp(-found.logits))).mean() == pytest.approx(labels.mean(), rel=0.15)


@pytest.mark.parametrize(("num_rows", "at_most"), [(24_000, 2_000), (10**9, 200_000), (10, 1_000), (5, 5)])
def test_a_sample_is_spread_evenly_over_the_rows(num_rows, at_most):
    runs = sampled_runs(num_rows, at_most=at_most, num_runs=50)

    assert sum(stop - first for first, stop in runs) == min(num_rows, at_most)
    assert all(stop <= first for (_, stop), (first, _) in pairwise(runs))
    assert runs[0][0] == 0
    gaps = np.diff([first for first, _ in runs])
    assert gaps.max(initial=0) - gaps.min(initial=10**9) <= 1


@pytest.mark.slow
def test_ten_times_the_rows_take_no_more_memory(clicks, many_clicks, monkeypatch):
    monkeypatch.setattr(baseline, "MOST_TRAIN_ROWS", 2_000)
    monkeypatch.setattr(baseline, "MOST_RATED_ROWS", 600)
    measured(clicks)  # What is imported for the first time is not counted.

    few, many = peak_bytes(clicks), peak_bytes(many_clicks)

    assert measured(many_clicks).num_train_rows == 2_000
    # Whole, 24,000 rows of 39 columns are 11 MB as one matrix of 12 bytes an entry.
    assert many < few + 2e6


def test_training_rows_of_one_class_have_none(tmp_path):
    table = tmp_path / "ones.tsv"
    row = "\t".join(["1", *["1"] * 13, *["a"] * 26])
    table.write_text(f"{row}\n" * 10)
    dataset = prepare_dataset(str(table), schema=CRITEO_SCHEMA, buckets_per_slot=8, out_dir=tmp_path / "d")

    only_clicks = PreparedClicks(directory=str(dataset.directory), description="ones", best_reachable=None)
    assert set(measure_baselines.fn(only_clicks).values()) == {"the training rows are all of one class"}


def test_a_failure_is_a_line_in_the_report(clicks, monkeypatch):
    def full(*arguments):
        raise MemoryError("cannot allocate\n2 lines")

    monkeypatch.setattr(baseline, "_design_matrix", full)
    found = measured(clicks)

    assert found == "it failed with MemoryError: cannot allocate"
    report = make_run_report(baseline=found)
    assert _baseline_remarks(report) == [
        "There is no logistic regression to compare with: it failed with MemoryError: cannot allocate."
    ]
    assert report.metrics()["quality/baseline_auc"] is None


def test_a_report_says_where_the_regression_saw_a_sample(clicks, monkeypatch):
    monkeypatch.setattr(baseline, "MOST_TRAIN_ROWS", 300)

    [line] = _baseline_remarks(make_run_report(baseline=measured(clicks)))

    assert line.startswith("logistic regression was fitted on 300 of these training rows")


def test_every_baseline_rates_the_same_rows(clicks):
    found = measure_baselines.fn(clicks)

    assert set(found) == {LOGISTIC_REGRESSION, LIGHTGBM}
    assert {each.rated_runs for each in found.values()} == {((2_400, 3_000),)}
    assert all(0.6 < each.quality.auc < 0.82 for each in found.values())
    assert all(each.processor_seconds > 0 for each in found.values())


def test_a_baseline_that_is_not_installed_is_a_line_and_the_other_is_measured(clicks, monkeypatch):
    monkeypatch.setitem(sys.modules, "lightgbm", None)

    found = measure_baselines.fn(clicks)

    assert found[LIGHTGBM] == "LightGBM is not installed; pip install 'heterps[baselines]'"
    assert found[LOGISTIC_REGRESSION].quality.num_rows == 600


def test_used_columns_are_taken_as_scipy_takes_them_without_a_pass_over_all_columns():
    matrix = random_array((50, 40), density=0.1, format="csr", rng=np.random.default_rng(0))
    used = np.array([3, 4, 17, 38])

    assert (_columns_of(matrix, used).toarray() == matrix[:, used].toarray()).all()
    # A column index of a billion columns would take 8 GB.
    wide = csr_matrix(([1.0], [999_999_999], [0, 1]), shape=(1, 10**9))
    assert _columns_of(wide, np.array([5, 999_999_999])).toarray().tolist() == [[0.0, 1.0]]
