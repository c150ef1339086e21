import itertools
import random

import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.planning.cost_model.instance_cover import InstanceCover


def least_price_by_trying(num_units, units, cents):
    """Least price over all count vectors, in whole cents so that sums are exact."""
    ranges = [range(-(-num_units // carried) + 1) for carried in units]
    return min(
        sum(count * price for count, price in zip(counts, cents, strict=True))
        for counts in itertools.product(*ranges)
        if sum(count * carried for count, carried in zip(counts, units, strict=True)) >= num_units
    )


def test_equals_trying_all_counts_far_beyond_where_the_best_size_repeats():
    generator = random.Random(3)
    for _ in range(25):
        units = [generator.randint(1, 5) for _ in range(generator.randint(1, 3))]
        cents = [generator.randint(10, 400) for _ in units]
        cover = InstanceCover(units, [price / 100 for price in cents], most_units=40)
        for num_units in (1, 2, 7, 19, 33, 40):
            expected = least_price_by_trying(num_units, units, cents)
            assert round(cover.price_usd_per_hour(num_units) * 100) == expected
            counts = cover.counts(num_units)
            assert sum(cents[index] * count for index, count in counts.items()) == expected
            assert sum(units[index] * count for index, count in counts.items()) >= num_units


def test_eight_gpu_machines_are_charged_whole():
    cover = InstanceCover([8], [24.0], most_units=17)

    assert [cover.price_usd_per_hour(units) for units in (1, 8, 9, 17)] == [24.0, 24.0, 48.0, 72.0]


@pytest.mark.parametrize(("units", "most"), [([], 3), ([1], 0)])
def test_nothing_to_buy_or_nothing_to_cover_is_refused(units, most):
    with pytest.raises(ConfigurationError, match="at least 1 unit and 1 option"):
        InstanceCover(units, [1.0] * len(units), most_units=most)
