"""The programme against all partitions of a small chain, priced one by one."""

import numpy as np
import pytest

from heterps_core.planning.search.capped.capped_chain import CappedChain
from heterps_core.planning.search.capped.mixed_integer import TOLERANCE, cheapest_by_programme
from tests.heterps_core.planning.search.capped.test_capped_chain import (
    ALL_PARTITIONS,
    CAPS,
    NUM_LAYERS,
    draw_changes,
    draw_replicas,
    price_within_caps,
    sold_in_pairs,
)
from tests.tiers import weekly_after


@pytest.mark.parametrize("max_units", CAPS)
@pytest.mark.parametrize("seed", weekly_after(2, range(6)))
def test_equals_trying_all_partitions(seed, max_units):
    replicas, caps, changes = draw_replicas(seed), np.array(max_units, dtype=float), draw_changes(seed)
    prices = sold_in_pairs(replicas)
    expected = min(price_within_caps(replicas, prices, rows[::-1], caps, changes) for rows in ALL_PARTITIONS)
    chain = chain_of(replicas, prices, caps, change_prices=changes)

    found = cheapest_by_programme(chain, target=chain.highest_price(), seconds=60.0)

    assert found.is_settled
    if np.isfinite(expected):
        assert price_within_caps(replicas, prices, found.rows, caps, changes) == pytest.approx(expected)
        assert expected * (1 - 1e-4) < found.lower_bound <= expected
    else:
        assert found.rows is None
        assert found.lower_bound >= chain.highest_price() * (1 - 2 * TOLERANCE)


@pytest.mark.parametrize("seed", range(6))
def test_a_limit_on_stages_holds_and_nothing_is_found_below_what_is_possible(seed):
    replicas = draw_replicas(seed)
    prices, caps = sold_in_pairs(replicas), np.full(3, 30.0)
    two_stages = [rows for rows in ALL_PARTITIONS if len(rows) <= 2]
    expected = min(price_within_caps(replicas, prices, rows[::-1], caps) for rows in two_stages)
    rows = np.flatnonzero(np.isfinite(prices))
    chain = chain_of(replicas, prices, caps, further=(np.ones((1, rows.size)), np.array([2.0])))

    found = cheapest_by_programme(chain, target=expected * 1.01, seconds=60.0)
    below = cheapest_by_programme(chain, target=expected * 0.99, seconds=60.0)

    assert price_within_caps(replicas, prices, found.rows, caps) == pytest.approx(expected)
    assert len(found.rows) <= 2
    assert below.rows is None
    assert below.is_settled
    assert expected * 0.98 < below.lower_bound < expected * 0.99


def chain_of(replicas, prices, caps, **more):
    rows = np.flatnonzero(np.isfinite(prices))
    return CappedChain(
        rows,
        prices=prices.reshape(-1)[rows],
        units=replicas.reshape(-1)[rows],
        caps=caps,
        num_layers=NUM_LAYERS,
        **more,
    )
