import numpy as np
import pytest

from heterps_core.planning.cost_model.stage_cost import is_within, replicated_seconds


@pytest.mark.parametrize(
    ("fraction", "replicas", "seconds"),
    [(1.0, 4, 2.5), (0.0, 4, 10.0), (0.5, 5, 6.0), (0.9, 1, 10.0)],  # 10 * (1 - f + f / k) by hand
)
def test_amdahl(fraction, replicas, seconds):
    assert replicated_seconds(10.0, fraction, replicas) == pytest.approx(seconds)


def test_takes_arrays_as_well_as_numbers():
    assert replicated_seconds(np.array([8.0, 4.0]), 1.0, np.array([2, 4])).tolist() == [4.0, 1.0]


def test_a_limit_is_kept_up_to_rounding_and_no_further():
    assert is_within(0.1 + 0.2, 0.3)
    assert not is_within(0.3 * (1 + 1e-9), 0.3)
