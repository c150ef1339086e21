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


def test_json_form_returns_the_same_transform():
    transform = NumericTransform(is_count=(True,), means=(0.1,), standard_deviations=(0.3,))

    assert NumericTransform.from_json(transform.to_json()) == transform
