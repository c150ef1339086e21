import json

import numpy as np
import pytest

from heterps_core.data.numeric_transform import NumericTransform, fit_numeric_transform, take_logarithms

NAN = float("nan")


def test_counts_become_signed_logarithms_and_other_columns_stay():
    values = np.array([[0.0, 3.0], [np.e - 1, -3.0], [-2.0, NAN], [NAN, 0.0]])

    found = take_logarithms(values, (True, False))

    np.testing.assert_allclose(found, [[0.0, 3.0], [1.0, -3.0], [-np.log(3), NAN], [NAN, 0.0]], rtol=1e-6)


def test_logarithm_keeps_the_order_across_zero():
    values = np.arange(-5.0, 6.0)[:, None]

    assert (np.diff(take_logarithms(values, (True,))[:, 0]) > 0).all()


@pytest.mark.parametrize("num_chunks", [1, 3, 50])
def test_fit_equals_numpy_however_the_rows_are_cut(num_chunks):
    generator = np.random.default_rng(0)
    values = generator.normal([5.0, 1e6, 0.0], [2.0, 30.0, 1.0], size=(100, 3)).astype(np.float32)
    values[generator.random(values.shape) < 0.3] = NAN

    found = fit_numeric_transform(np.array_split(values, num_chunks), (False,) * 3)

    np.testing.assert_allclose(found.means, np.nanmean(values.astype(float), axis=0), rtol=1e-9)
    np.testing.assert_allclose(found.standard_deviations, np.nanstd(values.astype(float), axis=0), rtol=1e-9)


def test_a_missing_value_becomes_0_which_is_the_mean():
    transform = NumericTransform(is_count=(False,), means=(10.0,), standard_deviations=(2.0,))

    assert transform.apply(np.array([[NAN], [10.0], [14.0]])).tolist() == [[0.0], [0.0], [2.0]]


def test_constant_and_empty_columns_are_only_centred():
    transform = fit_numeric_transform([np.array([[3.0, NAN], [3.0, NAN]], dtype=np.float32)], (False, False))

    assert transform.means == (3.0, 0.0)
    assert transform.standard_deviations == (1.0, 1.0)


def test_apply_takes_the_logarithm_first():
    transform = NumericTransform(is_count=(True,), means=(1.0,), standard_deviations=(0.5,))

    assert transform.apply(np.array([[np.e**2 - 1]]))[0, 0] == pytest.approx(2.0)


@pytest.mark.parametrize("extreme", [1e6, -1e12, 1e30, 1e300, -1e308])
@pytest.mark.parametrize(
    "column",
    [
        np.random.default_rng(0).normal(5.0, 2.0, 1_000),
        np.random.default_rng(0).integers(0, 2, 1_000).astype(float),
        np.random.default_rng(0).lognormal(0.0, 1.0, 1_000),
        np.where(np.arange(1_000) % 50, 0.0, np.arange(1_000.0)),
        np.arange(1_000.0) + 1.7e9,
        np.arange(8.0),
    ],
    ids=["normal", "flag", "lognormal", "mostly 0", "seconds", "few"],
)
def test_one_extreme_value_leaves_the_others_apart(column, extreme):
    without = fit_numeric_transform([column[:, None]], (False,))
    spoilt = np.concatenate([column, [extreme]])

    found = fit_numeric_transform([spoilt[:, None]], (False,))

    assert found.standard_deviations[0] == pytest.approx(without.standard_deviations[0], rel=0.7)
    dense = found.apply(spoilt[:, None])[:, 0]
    assert dense[:-1].std() == pytest.approx(1.0, abs=0.5)
    assert 2.0 < np.abs(dense[-1]) < 60.0
    assert dense[-1] in (dense.min(), dense.max())


@pytest.mark.parametrize("draw", ["normal", "uniform", "exponential", "laplace"])
def test_columns_without_extremes_have_the_mean_and_deviation_of_numpy(draw):
    values = getattr(np.random.default_rng(1), draw)(size=(100_000, 1))

    found = fit_numeric_transform([values], (False,))

    assert found.means[0] == pytest.approx(values.mean(), abs=2e-3)
    assert found.standard_deviations[0] == pytest.approx(values.std(), rel=5e-3)


def test_seconds_since_1970_keep_their_differences():
    seconds = 1_700_000_000.0 + np.arange(0.0, 3_600.0)[:, None]

    dense = fit_numeric_transform([seconds], (False,)).apply(seconds)[:, 0]

    expected = (seconds - seconds.mean()) / seconds.std()
    np.testing.assert_allclose(dense, expected[:, 0], atol=1e-6)
    assert len({*dense.tolist()}) == 3_600


def test_counts_beside_other_columns_are_the_same_as_alone():
    values = np.random.default_rng(2).integers(0, 10_000, (500, 2)).astype(float)

    together = fit_numeric_transform([take_logarithms(values, (True, False))], (True, False)).apply(values)

    for column, is_count in enumerate((True, False)):
        one = values[:, [column]]
        alone = fit_numeric_transform([take_logarithms(one, (is_count,))], (is_count,)).apply(one)
        np.testing.assert_allclose(together[:, [column]], alone, atol=1e-6)


def test_a_transform_without_bounds_as_models_of_before_have_it_is_applied_as_then():
    transform = NumericTransform(is_count=(False,), means=(1.0,), standard_deviations=(2.0,))

    assert transform.apply(np.array([[1e6], [1e39 * 2]]))[:, 0].tolist() == [499_999.5, float("inf")]
    assert (
        NumericTransform.from_json({"is_count": [False], "means": [1.0], "standard_deviations": [2.0]})
        == transform
    )


def test_json_form_returns_the_same_transform():
    transform = fit_numeric_transform([np.array([[1.0], [2.0], [1e300]])], (False,))
    json.dumps(transform.to_json(), allow_nan=False)

    assert NumericTransform.from_json(transform.to_json()) == transform
