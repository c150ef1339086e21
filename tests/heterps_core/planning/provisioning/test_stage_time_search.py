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

    shift_seconds = 0.0

    def solve(self, stage_seconds, best_product):
        self.num_solved += stage_seconds.size
        units = np.ceil(self.work / stage_seconds[:, None])
        units[units > self.max_units] = np.inf
        rates = units @ self.prices
        reached = np.where(np.isfinite(rates), (self.work / units).max(axis=1), stage_seconds)
        return RateSolutions(
            rates=rates, reached_seconds=reached, products=rates * reached, plan_at=lambda i: units[i]
        )

    def all_products(self, low, high):
        """Products at every stage time at which some count changes."""
        times = {w / k for w in self.work for k in range(1, self.max_units + 1)}
        return self.solve(np.array(sorted(x for x in times if low <= x <= high)), np.inf).products


@pytest.mark.parametrize("seed", range(10))
def test_equals_trying_every_stage_time(seed):
    random = np.random.default_rng(seed)
    solver = DividedWork(random.uniform(0.1, 3, 4), random.uniform(0.01, 3, 4), 60)
    products = solver.all_products(0.02, 1.5)

    found = minimise_stage_time_rate(solver, low_seconds=0.02, high_seconds=1.5, batch_size=8)

    assert found.product == pytest.approx(products.min(), rel=1e-12)
    assert found.lower_bound == pytest.approx(found.product, rel=1e-12)


def test_few_stage_times_are_solved():
    solver = DividedWork([1.0, 0.37, 2.9], [0.04, 2.4, 1.0], 1_000)

    minimise_stage_time_rate(solver, low_seconds=0.003, high_seconds=3.0, batch_size=8)

    # Work that divides without loss is the hardest case: every stage time costs nearly the same.
    assert solver.num_solved < 1_500  # of 3,000 at which some count changes


def test_only_what_beats_a_known_product_is_looked_for():
    solver = DividedWork([1.0, 0.37], [0.04, 2.4], 60)
    best = minimise_stage_time_rate(solver, low_seconds=0.02, high_seconds=1.5, batch_size=8)

    none = minimise_stage_time_rate(
        solver, low_seconds=0.02, high_seconds=1.5, batch_size=8, known_product=best.product
    )

    assert none.plan is None
    assert none.lower_bound == best.product


def test_an_empty_range_has_no_plan():
    solver = DividedWork([1.0], [1.0], 10)

    assert minimise_stage_time_rate(solver, low_seconds=2.0, high_seconds=1.0, batch_size=8).plan is None
    assert least_stage_seconds(solver, low_seconds=0.01, high_seconds=0.05) == np.inf


def test_the_least_stage_time_is_that_of_all_units():
    solver = DividedWork([1.0, 3.0], [1.0, 1.0], 10)

    assert least_stage_seconds(solver, low_seconds=0.01, high_seconds=5.0) == pytest.approx(0.3, rel=1e-9)
