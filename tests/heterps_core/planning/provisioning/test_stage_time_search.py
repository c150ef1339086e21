import numpy as np
import pytest

from heterps_core.planning.provisioning.stage_time_search import (
    RateSolutions,
    least_stage_seconds,
    minimise_stage_time_rate,
)


class DividedWork:
    """Pieces of work w that k units do in w / k seconds, at a price per unit; at most `max_units` each."""

    def __init__(self, work, prices, max_units):
        self.work, self.prices, self.max_units = np.array(work), np.array(prices), max_units
        self.num_solved = 0

    def solve(self, stage_seconds):
        self.num_solved += stage_seconds.size
        units = np.ceil(self.work / stage_seconds[:, None])
        units[units > self.max_units] = np.inf
        rates = units @ self.prices
        reached = np.where(np.isfinite(rates), (self.work / units).max(axis=1), stage_seconds)
        return RateSolutions(rates=rates, reached_seconds=reached, products=rates * reached, replicas=units)

    def reached_within(self, x):
        found = self.solve(np.array([x]))
        return found.reached_seconds[0] if np.isfinite(found.products[0]) else np.inf

    def all_products(self, low, high):
        """Products at every stage time at which some count changes."""
        times = {w / k for w in self.work for k in range(1, self.max_units + 1)}
        return self.solve(np.array(sorted(x for x in times if low <= x <= high))).products


def cheapest(solver, **terms):
    return minimise_stage_time_rate(solver.solve, shift_seconds=0.0, batch_size=8, **terms)


@pytest.mark.parametrize("seed", range(10))
def test_equals_trying_every_stage_time(seed):
    random = np.random.default_rng(seed)
    solver = DividedWork(random.uniform(0.1, 3, 4), random.uniform(0.01, 3, 4), 60)
    products = solver.all_products(0.02, 1.5)

    _, product = cheapest(solver, low_seconds=0.02, high_seconds=1.5)

    assert product == pytest.approx(products.min(), rel=1e-12)


def test_few_stage_times_are_solved():
    solver = DividedWork([1.0, 0.37, 2.9], [0.04, 2.4, 1.0], 1_000)

    cheapest(solver, low_seconds=0.003, high_seconds=3.0)

    # Work that divides without loss is the hardest case: every stage time costs nearly the same.
    assert solver.num_solved < 1_500  # of 3,000 at which some count changes


def test_only_what_beats_a_known_product_is_looked_for():
    solver = DividedWork([1.0, 0.37], [0.04, 2.4], 60)
    _, best = cheapest(solver, low_seconds=0.02, high_seconds=1.5)

    found = cheapest(solver, low_seconds=0.02, high_seconds=1.5, known_product=best)

    assert found == (None, np.inf)


def test_an_empty_range_has_no_plan():
    solver = DividedWork([1.0], [1.0], 10)

    assert cheapest(solver, low_seconds=2.0, high_seconds=1.0) == (None, np.inf)
    assert least_stage_seconds(solver.reached_within, low_seconds=0.01, high_seconds=0.05) == np.inf


def test_the_least_stage_time_is_that_of_all_units():
    solver = DividedWork([1.0, 3.0], [1.0, 1.0], 10)

    assert least_stage_seconds(solver.reached_within, low_seconds=0.01, high_seconds=5.0) == pytest.approx(
        0.3, rel=1e-9
    )
