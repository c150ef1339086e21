from itertools import pairwise, product

import numpy as np
import pytest
from scipy.optimize import linprog

from heterps_core.planning.search.capped.capped_chain import CappedChain, prices_of_differing_neighbours
from heterps_core.planning.search.capped.partial_plans import (
    MAX_PARTIAL_PLANS,
    CappedPartition,
    cheapest_below,
)
from heterps_core.planning.search.capped.scarcity_prices import ascend
from heterps_core.planning.search.capped.window_search import WindowSearch
from tests.tiers import weekly_after

NUM_LAYERS, NUM_TYPES = 5, 3


def all_partitions(num_layers, num_types, first=0):
    """Yield every partition of layers first.. as a list of flat rows."""
    if first == num_layers:
        yield []
        return
    for last in range(first, num_layers):
        for device_type in range(num_types):
            row = (last * (last + 1) // 2 + first) * num_types + device_type
            for rest in all_partitions(num_layers, num_types, last + 1):
                yield [row, *rest]


UNIT_PRICES = np.array([0.3, 1.0, 1.7])
ALL_PARTITIONS = list(all_partitions(NUM_LAYERS, NUM_TYPES))
CAPS = [(4, 4, 4), (9, 3, 2), (2, 2, 2), (30, 1, 1), (1, 6, 3)]


def draw_replicas(seed):
    random = np.random.default_rng(seed)
    replicas = random.integers(1, 9, size=(15, NUM_TYPES)).astype(float)
    replicas[random.random((15, NUM_TYPES)) < 0.15] = np.inf
    return replicas


def sold_in_pairs(replicas):
    """Prices of stages whose units are bought two at a time."""
    return np.ceil(replicas / 2) * 2 * UNIT_PRICES


def draw_changes(seed):
    """Boundaries between two types, a third of them forbidden."""
    forbidden = np.random.default_rng(seed).random((NUM_LAYERS, NUM_TYPES, NUM_TYPES)) < 1 / 3
    return np.where(forbidden, np.inf, 0.0)


def price_within_caps(replicas, stage_prices, rows, max_units, changes=None):
    """The price of one partition, its rows last stage first, counted stage by stage."""
    counts, types = replicas.reshape(-1)[rows], np.array(rows) % NUM_TYPES
    used = np.array([counts[types == index].sum() for index in range(NUM_TYPES)])
    price = float(stage_prices.reshape(-1)[rows].sum())
    if changes is not None:
        runs = [(first, last) for last in range(NUM_LAYERS) for first in range(last + 1)]
        for after, before in pairwise(rows):
            first_layer, _ = runs[after // NUM_TYPES]
            price += changes[first_layer, before % NUM_TYPES, after % NUM_TYPES]
    return price if (used <= max_units).all() else np.inf


def cheapest_capped_partition(replicas, *, stage_prices, max_units, cutoff, change_prices=None):
    """Price the caps, strike hopeless stages out, search what is left: the steps of `capped_search.py`."""
    rows = np.flatnonzero(np.isfinite(stage_prices))
    num_runs = len(stage_prices)
    chain = CappedChain(
        rows,
        prices=stage_prices.reshape(-1)[rows],
        units=replicas.reshape(-1)[rows],
        caps=max_units,
        num_layers=int((np.sqrt(8 * num_runs + 1) - 1) // 2),
        change_prices=change_prices,
    )
    # No plan within the caps costs more than all units together: a bound above that proves there is none.
    everything = chain.highest_price()
    target = min(cutoff, everything)
    ascent = ascend(chain, target=target)
    if ascent.lower_bound < target:
        chain = chain.without_hopeless(ascent.scarcity, target)
        found = cheapest_below(chain, ascent.scarcity, target=target, most_partial_plans=MAX_PARTIAL_PLANS)
    else:
        found = CappedPartition(rows=None, lower_bound=ascent.lower_bound, is_settled=True)
    if found.rows is None and found.lower_bound >= everything:
        return CappedPartition(rows=None, lower_bound=np.inf, is_settled=True)
    return found


@pytest.mark.parametrize("max_units", CAPS)
@pytest.mark.parametrize("seed", weekly_after(2, range(6)))
def test_equals_trying_all_partitions(seed, max_units):
    replicas, caps = draw_replicas(seed), np.array(max_units, dtype=float)
    prices = replicas * UNIT_PRICES
    expected = min(price_within_caps(replicas, prices, rows, caps) for rows in ALL_PARTITIONS)

    found = cheapest_capped_partition(replicas, stage_prices=prices, max_units=caps, cutoff=np.inf)

    assert found.is_settled
    assert found.lower_bound == pytest.approx(expected)
    if np.isfinite(expected):
        assert price_within_caps(replicas, prices, found.rows, caps) == pytest.approx(expected)
    else:
        assert found.rows is None


@pytest.mark.parametrize("max_units", CAPS)
@pytest.mark.parametrize("seed", weekly_after(2, range(6)))
def test_equals_trying_all_partitions_where_units_are_sold_in_pairs_and_boundaries_are_forbidden(
    seed, max_units
):
    replicas, caps, changes = draw_replicas(seed), np.array(max_units, dtype=float), draw_changes(seed)
    prices = sold_in_pairs(replicas)
    # The listing has the first stage first, partitions are returned the other way round.
    expected = min(price_within_caps(replicas, prices, rows[::-1], caps, changes) for rows in ALL_PARTITIONS)

    found = cheapest_capped_partition(
        replicas, stage_prices=prices, max_units=caps, cutoff=np.inf, change_prices=changes
    )

    assert found.is_settled
    assert found.lower_bound == pytest.approx(expected)
    if np.isfinite(expected):
        assert price_within_caps(replicas, prices, found.rows, caps, changes) == pytest.approx(expected)


@pytest.mark.parametrize("max_units", CAPS)
@pytest.mark.parametrize("seed", weekly_after(2, range(6)))
def test_equals_trying_all_partitions_without_neighbours_of_one_type(seed, max_units):
    replicas, caps = draw_replicas(seed), np.array(max_units, dtype=float)
    prices = sold_in_pairs(replicas)
    differing = [
        rows
        for rows in ALL_PARTITIONS
        if all(left % NUM_TYPES != right % NUM_TYPES for left, right in pairwise(rows))
    ]
    expected = min(price_within_caps(replicas, prices, rows, caps) for rows in differing)

    found = cheapest_capped_partition(
        replicas,
        stage_prices=prices,
        max_units=caps,
        cutoff=np.inf,
        change_prices=prices_of_differing_neighbours(np.arange(NUM_TYPES), NUM_LAYERS),
    )

    assert found.is_settled
    assert found.lower_bound == pytest.approx(expected)


@pytest.mark.parametrize("max_units", CAPS)
def test_proves_that_nothing_is_below_the_cutoff(max_units):
    caps = np.array(max_units, dtype=float)
    for seed in range(40):
        replicas = draw_replicas(seed)
        prices = replicas * UNIT_PRICES
        expected = min(price_within_caps(replicas, prices, rows, caps) for rows in ALL_PARTITIONS)
        if not np.isfinite(expected):
            continue
        cutoff = expected * 0.99

        found = cheapest_capped_partition(replicas, stage_prices=prices, max_units=caps, cutoff=cutoff)

        assert found.is_settled
        assert found.rows is None
        assert cutoff <= found.lower_bound <= expected * (1 + 1e-9), f"seed {seed}"


def test_the_bound_of_few_partial_plans_is_valid():
    gave_up = 0
    for seed, max_units in product(range(20), CAPS):
        replicas, caps = draw_replicas(seed), np.array(max_units, dtype=float) + 4
        lasts, firsts = np.tril_indices(NUM_LAYERS)
        replicas[lasts - firsts > 1] = np.inf  # no stage takes more than two layers
        prices = replicas * UNIT_PRICES
        expected = min(price_within_caps(replicas, prices, rows, caps) for rows in ALL_PARTITIONS)
        rows = np.flatnonzero(np.isfinite(replicas))
        chain = CappedChain(
            rows,
            prices=prices.reshape(-1)[rows],
            units=replicas.reshape(-1)[rows],
            caps=caps,
            num_layers=NUM_LAYERS,
        )

        found = cheapest_below(chain, np.zeros(NUM_TYPES), target=np.inf, most_partial_plans=1)

        assert found.lower_bound <= expected * (1 + 1e-9)
        assert not found.is_settled or found.lower_bound == pytest.approx(expected)
        gave_up += not found.is_settled
    assert gave_up > 3


def chain_of(replicas, caps, change_prices=None):
    rows = np.flatnonzero(np.isfinite(replicas))
    return CappedChain(
        rows,
        prices=(replicas * UNIT_PRICES).reshape(-1)[rows],
        units=replicas.reshape(-1)[rows],
        caps=caps,
        num_layers=NUM_LAYERS,
        change_prices=change_prices,
    )


@pytest.mark.parametrize("max_units", CAPS)
@pytest.mark.parametrize("seed", range(4))
def test_prices_of_scarce_units_give_the_bound_of_all_mixtures_of_partitions(seed, max_units):
    # By linear programming duality the best prices are worth the cheapest mixture that keeps the caps.
    replicas, caps, changes = draw_replicas(seed), np.array(max_units, dtype=float) + 3, draw_changes(seed)
    prices, used = [], []
    for rows in ALL_PARTITIONS:
        counts, types = replicas.reshape(-1)[rows], np.array(rows) % NUM_TYPES
        price = price_within_caps(replicas, replicas * UNIT_PRICES, rows[::-1], np.inf, changes)
        if np.isfinite(price):
            prices.append(price)
            used.append([counts[types == index].sum() for index in range(NUM_TYPES)])
    mixture = linprog(
        prices, A_ub=np.array(used).T, b_ub=caps, A_eq=np.ones((1, len(prices))), b_eq=[1.0], bounds=(0, None)
    )
    chain = chain_of(replicas, caps, changes)

    found = ascend(chain, target=chain.highest_price())

    if mixture.fun is None:
        assert found.lower_bound >= chain.highest_price()
    elif found.best is None or chain.price(found.best) > found.lower_bound:
        assert mixture.fun * (1 - 2e-3) <= found.lower_bound <= mixture.fun * (1 + 1e-9)
    else:
        assert found.lower_bound <= chain.price(found.best) * (1 + 1e-9)


@pytest.mark.parametrize("max_units", CAPS)
def test_windows_that_are_divided_again_come_to_the_cheapest_partition(max_units):
    num_found = num_missed = 0
    for seed in range(20):
        replicas, caps, changes = (
            draw_replicas(seed),
            np.array(max_units, dtype=float) + 3,
            draw_changes(seed),
        )
        prices = replicas * UNIT_PRICES
        expected = min(
            price_within_caps(replicas, prices, rows[::-1], caps, changes) for rows in ALL_PARTITIONS
        )
        chain = chain_of(replicas, caps, changes)
        ascent = ascend(chain, target=chain.highest_price())
        if not ascent.nearest.size or not np.isfinite(expected):
            continue

        found = list(
            WindowSearch(chain, np.random.default_rng(seed)).partitions(ascent.nearest, ascent.scarcity, 40)
        )

        costs = [
            price_within_caps(replicas, prices, chain.rows[stages[::-1]], caps, changes) for stages in found
        ]
        assert costs == pytest.approx([chain.price(stages) for stages in found])
        assert costs == sorted(costs, reverse=True)
        is_found = bool(costs) and costs[-1] == pytest.approx(expected)
        num_found, num_missed = num_found + is_found, num_missed + (not is_found)
    assert num_missed <= num_found / 4
