"""The fitted law of samples to an AUC, held against trainings made by a law that is known."""

import numpy as np
import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.planning.quality_curve import QualityCurve, QualityPoint

LIMIT, POWER, BATCH, SAMPLES = 0.82, 4.0, 700.0, 0.035


def samples_of(auc, batch_size):
    return SAMPLES * (LIMIT - auc) ** -POWER * (1 + batch_size / BATCH)


def trainings(noise=0.0, seed=0):
    generator = np.random.default_rng(seed)
    points = []
    for num_samples in (4_000, 8_000, 16_000):
        for batch_size in (32, 128, 512):
            effective = num_samples / (1 + batch_size / BATCH) * np.exp(noise * generator.normal())
            auc = LIMIT - (SAMPLES / effective) ** (1 / POWER)
            points.append(QualityPoint(num_samples=num_samples, batch_size=batch_size, auc=auc))
    return points


@pytest.mark.parametrize("batch_size", [64, 1_024])
def test_samples_at_four_times_the_largest_training_are_those_of_the_known_law(batch_size):
    curve = QualityCurve.of(trainings())
    auc = LIMIT - (SAMPLES * (1 + batch_size / BATCH) / 64_000) ** (1 / POWER)

    needed = curve.samples_needed(auc, batch_size)

    assert samples_of(auc, batch_size) == pytest.approx(64_000)
    assert needed.median == pytest.approx(64_000, rel=0.15)
    assert needed.low < 64_000 < needed.high
    assert curve.auc_after(needed.median, batch_size) == pytest.approx(auc, abs=0.001)


def test_the_range_holds_the_truth_in_most_of_forty_noisy_curves_and_grows_with_the_distance():
    held = []
    for seed in range(40):
        curve = QualityCurve.of(trainings(noise=0.08, seed=seed))
        auc = LIMIT - (SAMPLES * (1 + 128 / BATCH) / 32_000) ** (1 / POWER)
        near, far = curve.samples_needed(auc, 128), curve.samples_needed(auc + 0.01, 128)
        held.append(near.low <= 32_000 <= near.high)
        assert far.high / far.low > near.high / near.low

    assert np.mean(held) >= 0.8


def test_larger_batches_need_more_samples_and_an_auc_above_every_limit_is_never_reached():
    curve = QualityCurve.of(trainings())

    needs = [curve.samples_needed(0.78, batch_size).median for batch_size in (32, 256, 2_048)]

    assert needs == sorted(needs)
    assert needs[2] / needs[0] == pytest.approx((1 + 2_048 / BATCH) / (1 + 32 / BATCH), rel=0.2)
    assert curve.samples_needed(0.9999, 32).low == np.inf


@pytest.mark.parametrize("count", [0, 2])
def test_fewer_than_three_trainings_are_no_curve(count):
    with pytest.raises(ConfigurationError, match=f"at least 3 trainings of different .*, got {count} with"):
        QualityCurve.of(trainings()[:count])


def test_trainings_of_one_number_of_samples_are_no_curve():
    with pytest.raises(ConfigurationError, match=r"got 3 with 4,000, 4,000, 4,000; take more rows"):
        QualityCurve.of(trainings()[:3])
