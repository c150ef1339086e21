"""From how many replicas on a time is kept, against the roots that NumPy finds and counting."""

import numpy as np
import pytest

from heterps_core.planning.cost_model.replica_roots import kept_counts

MOST_REPLICAS = 3_000


def drawn(seed, size=400):
    """Return limits and the terms of times over replicas, of very different sizes; some are 0."""
    random = np.random.default_rng(seed)

    def draw(low, high, share_of_zeros):
        values = 10 ** random.uniform(low, high, size)
        return np.where(random.random(size) < share_of_zeros, 0.0, values)

    fixed, shared, saved, per_peer = (
        draw(-3, 0, 0.2),
        draw(-2, 1, 0.1) * random.choice([1, 1, 1, -0.1], size),
        draw(-2, 1, 0.3),
        draw(-9, -1, 0.2),
    )
    limit = fixed + draw(-3, 1, 0.0)
    return limit, fixed, shared, saved, per_peer


@pytest.mark.parametrize("seed", range(5))
def test_each_count_after_a_gap_keeps_the_limit_first_where_counting_says_so(seed):
    limit, fixed, shared, saved, per_peer = drawn(seed)
    counts = np.arange(1.0, MOST_REPLICAS + 1)[:, None]
    times = fixed + shared / counts - saved / counts**2 + per_peer * counts
    keeps = times <= limit

    kept = kept_counts(limit, fixed, shared, saved, per_peer)

    num_gaps = 0
    for index in range(limit.size):
        kept_at = np.flatnonzero(keeps[:, index]) + 1
        first_broken = np.flatnonzero(~keeps[:, index])[:1] + 1
        after = kept_at[kept_at > first_broken[0]] if first_broken.size else kept_at[:0]
        if keeps[0, index] and first_broken.size:
            assert first_broken[0] >= kept.last_before[index] * (1 - 1e-9) or after.size == 0
        if after.size:
            num_gaps += 1
            assert after[0] - 1 < kept.first_after[index] * (1 + 1e-9) <= after[0] * (1 + 2e-9)
    assert num_gaps > 50


@pytest.mark.parametrize("seed", range(5))
def test_the_first_count_after_a_gap_is_the_middle_root_of_three(seed):
    limit, fixed, shared, saved, per_peer = drawn(seed)
    kept = kept_counts(limit, fixed, shared, saved, per_peer)

    num_roots = 0
    for index in np.flatnonzero(per_peer > 1e-6):
        roots = np.roots([per_peer[index], fixed[index] - limit[index], shared[index], -saved[index]])
        real = np.sort(roots.real[np.abs(roots.imag) < 1e-9 * np.abs(roots.real)])
        if real.size == 3 and real[0] >= 0 and real[1] > 1:
            num_roots += 1
            assert kept.first_after[index] == pytest.approx(real[1], rel=1e-6)
    assert num_roots > 10


def test_the_least_of_all_times_is_kept_by_the_count_that_takes_it():
    """Ten replicas take 1 + 10 / 10 + 0.1 x 10 = 3 seconds, all others more: two roots are the same."""
    kept = kept_counts(np.array([3.0]), 1.0, 10.0, 0.0, 0.1)

    assert kept.first_after[0] == pytest.approx(10.0, rel=1e-5)
    assert kept.first_after[0] <= 10.0


@pytest.mark.parametrize(("limit", "expected"), [(2.999, np.inf), (11.2, 1.0)])
def test_a_limit_below_all_times_is_never_kept_and_one_above_that_of_one_replica_always(limit, expected):
    assert kept_counts(np.array([limit]), 1.0, 10.0, 0.0, 0.1).first_after[0] == expected
