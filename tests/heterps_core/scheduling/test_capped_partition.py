import numpy as np
import pytest

from heterps_core.scheduling import capped_partition
from heterps_core.scheduling.capped_partition import cheapest_capped_partition
from tests.heterps_core.scheduling.test_chain_partition import all_partitions

UNIT_PRICES = np.array([0.3, 1.0, 1.7])
ALL_PARTITIONS = list(all_partitions(5, 3))


def draw_replicas(seed):
    random = np.random.default_rng(seed)
    replicas = random.integers(1, 9, size=(15, 3)).astype(float)
    replicas[random.random((15, 3)) < 0.15] = np.inf
    return replicas


def price_within_caps(replicas, rows, max_units):
    counts, types = replicas.reshape(-1)[rows], np.array(rows) % 3
    used = np.array([counts[types == index].sum() for index in range(3)])
    return float(used @ UNIT_PRICES) if (used <= max_units).all() else np.inf


@pytest.mark.parametrize("max_units", [(4, 4, 4), (9, 3, 2), (2, 2, 2), (30, 1, 1), (1, 6, 3)])
@pytest.mark.parametrize("seed", range(6))
def test_equals_trying_all_partitions(seed, max_units):
    replicas, caps = draw_replicas(seed), np.array(max_units, dtype=float)
    expected = min(price_within_caps(replicas, rows, caps) for rows in ALL_PARTITIONS)

    found = cheapest_capped_partition(replicas, unit_prices=UNIT_PRICES, max_units=caps, cutoff=np.inf)

    assert found.is_settled
    assert found.lower_bound == pytest.approx(expected)
    if np.isfinite(expected):
        assert price_within_caps(replicas, found.rows, caps) == pytest.approx(expected)
    else:
        assert found.rows is None


def test_proves_that_nothing_is_below_the_cutoff():
    replicas, caps = draw_replicas(1), np.array([9.0, 3.0, 2.0])
    expected = min(price_within_caps(replicas, rows, caps) for rows in ALL_PARTITIONS)

    found = cheapest_capped_partition(
        replicas, unit_prices=UNIT_PRICES, max_units=caps, cutoff=expected * 0.99
    )

    assert found.is_settled
    assert expected * 0.99 <= found.lower_bound <= expected * (1 + 1e-9)


def test_keeps_a_valid_bound_when_it_gives_up(monkeypatch):
    monkeypatch.setattr(capped_partition, "MAX_PARTIAL_PLANS", 1)
    caps = np.array([4.0, 4.0, 4.0])
    gave_up = 0
    for seed in range(30):
        replicas = draw_replicas(seed)
        expected = min(price_within_caps(replicas, rows, caps) for rows in ALL_PARTITIONS)
        found = cheapest_capped_partition(replicas, unit_prices=UNIT_PRICES, max_units=caps, cutoff=np.inf)
        gave_up += not found.is_settled
        assert found.lower_bound <= expected * (1 + 1e-9)
    assert gave_up > 3
