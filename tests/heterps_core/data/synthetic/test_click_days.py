"""The days are those of a truth that moves: checked against NumPy, plain models, and the truth of other days."""

import gzip
import math
from datetime import date, timedelta

import numpy as np
import pytest
from sklearn.feature_extraction import FeatureHasher
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss, roc_auc_score

from heterps_core.data.reading.days import partitions_of
from heterps_core.data.reading.source_files import files_of_day
from heterps_core.data.synthetic.click_stream import truth_of_day, write_click_days, write_click_stream
from heterps_core.data.synthetic.click_truth import SLOT_CARDINALITIES
from heterps_core.errors import ConfigurationError

FIRST_DAY = date(2026, 11, 1)
ROWS = 4_000
NUM_DAYS = 8


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    return write_click_days(
        tmp_path_factory.mktemp("days"),
        first_day=FIRST_DAY,
        num_days=NUM_DAYS,
        rows_per_day=ROWS,
        seed=1,
        drift=0.2,
    )


def rows_of(day):
    """Return labels and the 39 raw fields of each row."""
    lines = [line.split("\t") for line in gzip.decompress(day.path.read_bytes()).decode().splitlines()]
    return np.array([int(fields[0]) for fields in lines]), [fields[1:] for fields in lines]


def test_days_are_partitions_that_a_night_finds(days):
    entries = partitions_of(days[0].path.parent.parent)
    found = {day: files_of_day(entries[day]) for day in entries}

    assert list(found) == [FIRST_DAY + timedelta(days=number) for number in range(NUM_DAYS)]
    assert found[FIRST_DAY] == (days[0].path,)


def test_the_best_reachable_quality_of_a_day_is_that_of_its_probabilities(days):
    for day in days[:2]:
        labels, _ = rows_of(day)
        probabilities = day.click_probabilities()

        best = day.best_reachable()

        assert best.num_rows == len(labels) == ROWS
        assert best.auc == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-12)
        assert best.log_loss == pytest.approx(log_loss(labels, probabilities), abs=1e-9)


def test_every_day_is_as_easy_to_predict_as_another(days):
    labels = [rows_of(day)[0] for day in days]

    assert [each.mean() for each in labels] == pytest.approx([0.25] * NUM_DAYS, abs=0.035)
    assert [day.best_reachable().auc for day in days] == pytest.approx([0.81] * NUM_DAYS, abs=0.03)


def test_a_day_is_the_same_whichever_days_are_written_with_it(days, tmp_path):
    [alone] = write_click_days(
        tmp_path,
        first_day=FIRST_DAY + timedelta(days=3),
        num_days=1,
        rows_per_day=ROWS,
        seed=1,
        drift=0.2,
    )

    assert rows_of(alone)[1] == rows_of(days[3])[1]
    np.testing.assert_array_equal(alone.click_probabilities(), days[3].click_probabilities())


def test_without_drift_the_truth_is_that_of_the_plain_stream(tmp_path):
    stream = write_click_stream(tmp_path / "clicks.tsv", num_rows=2_000, seed=4)
    generator = np.random.default_rng([4, 0])

    probabilities, _ = truth_of_day(FIRST_DAY, seed=4, drift=0.0, new_id_share=0.0).draw(generator, 16_384)

    # Rows are drawn alike; only their scale is estimated from other rows.
    np.testing.assert_allclose(probabilities[:2_000], stream.click_probabilities(), atol=0.02)


@pytest.mark.parametrize("num_days", [1, 5])
def test_effects_of_two_days_correlate_by_the_cosine_of_their_angle(num_days):
    before, after = (
        truth_of_day(FIRST_DAY + timedelta(days=days), seed=2, drift=0.2, new_id_share=0.0)._effects.values
        for days in (0, num_days)
    )

    standardised = [
        np.concatenate(
            [effects * math.sqrt(size) for effects, size in zip(day, SLOT_CARDINALITIES, strict=True)]
        )
        for day in (before, after)
    ]

    # 9,000 draws: the correlation is known to about 0.01.
    assert np.corrcoef(*standardised)[0, 1] == pytest.approx(math.cos(0.2 * num_days), abs=0.03)
    assert standardised[1].std() == pytest.approx(standardised[0].std(), rel=0.05)


def test_new_ids_appear_at_the_promised_rate_and_others_stay():
    texts = [
        truth_of_day(FIRST_DAY + timedelta(days=days), seed=0, drift=0.0, new_id_share=0.1)._texts
        for days in range(11)
    ]
    large = [slot for slot, size in enumerate(SLOT_CARDINALITIES) if size >= 100]
    small = [slot for slot, size in enumerate(SLOT_CARDINALITIES) if size < 100]

    def known(slot, day):
        return set(texts[day][slot].to_pylist()) - {None}

    new = sum(len(known(slot, 1) - known(slot, 0)) for slot in large)
    assert new / sum(SLOT_CARDINALITIES[slot] for slot in large) == pytest.approx(0.1, abs=0.02)
    assert all(known(slot, 10).isdisjoint(known(slot, 0)) for slot in large)
    assert all(known(slot, 10) == known(slot, 0) for slot in small)


def test_a_model_that_goes_on_every_day_beats_one_that_was_trained_once(days):
    hasher = FeatureHasher(n_features=2**16, input_type="string")

    def features_of(day):
        labels, fields = rows_of(day)
        texts = [[f"{column}={value}" for column, value in enumerate(row)] for row in fields]
        return hasher.transform(texts), labels

    known = [features_of(day) for day in days]
    once, nightly = (SGDClassifier(loss="log_loss", alpha=1e-5, random_state=0) for _ in range(2))
    gains = []
    for number in range(NUM_DAYS - 1):
        for model in [nightly, once] if number == 0 else [nightly]:
            for _ in range(3):
                model.partial_fit(*known[number], classes=[0, 1])
        rows, labels = known[number + 1]
        gains.append(
            roc_auc_score(labels, nightly.decision_function(rows))
            - roc_auc_score(labels, once.decision_function(rows))
        )

    assert gains[0] == 0
    assert np.mean(gains[-3:]) > 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_days": 0}, "num_days must be at least 1, got 0"),
        ({"num_days": 10**7}, "num_days must be at most .* from 2026-.* on, got 10000000"),
        ({"rows_per_day": 0}, "rows_per_day must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path, changes, message):
    values = {"first_day": FIRST_DAY, "num_days": 1, "rows_per_day": 10, "seed": 0}

    with pytest.raises(ConfigurationError, match=message):
        write_click_days(tmp_path, **{**values, **changes})
