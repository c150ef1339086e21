import math
from dataclasses import replace

import numpy as np
import pytest

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.explain.changes import MOST_FACTOR, next_price_flip
from heterps_core.planning.problem.extra_costs import InstanceSize
from heterps_core.planning.search.optimum import find_optimum
from tests.heterps_core.planning.explain.trying_all import (
    feasible_plans,
    placement_of,
    tiny_problem,
    with_all_costs,
)
from tests.tiers import weekly_after

NUM_FACTORS = 4_001


def with_price(problem, device_type, factor):
    unit = problem.device_types[device_type]
    sizes = tuple(
        replace(size, price_usd_per_hour=size.price_usd_per_hour * factor) for size in unit.instances
    )
    costlier = replace(unit, price_usd_per_hour=unit.price_usd_per_hour * factor, instances=sizes)
    return replace(problem, device_types={**problem.device_types, device_type: costlier})


def first_factor_by_trying_all(problem, plans, device_type, placement, farthest):
    """Return the first two factors of a grid between which another placement becomes cheapest, or None."""
    costlier = with_price(problem, device_type, 2.0)
    lines = np.array([[cost, evaluate(costlier, stages).cost_usd - cost] for _, stages, cost in plans])
    is_mine = np.array([mine == placement for mine, _, _ in plans])
    factors = np.geomspace(1.0, farthest, NUM_FACTORS)
    costs = lines[:, :1] + lines[:, 1:] * (factors - 1)
    wins = costs[~is_mine].min(axis=0, initial=math.inf) < costs[is_mine].min(axis=0) * (1 - 1e-9)
    first = int(wins.argmax())
    return (factors[max(first - 1, 0)], factors[first]) if wins.any() else None


@pytest.mark.parametrize("has_all_costs", [False, True])
@pytest.mark.parametrize("floor_samples_per_s", [0.0, 5_000.0])
@pytest.mark.parametrize("seed", weekly_after(1, range(4)))
def test_the_next_flip_is_where_another_placement_of_all_plans_becomes_cheapest_first(
    seed, floor_samples_per_s, has_all_costs
):
    problem = tiny_problem(seed, floor_samples_per_s=floor_samples_per_s)
    problem = with_all_costs(problem) if has_all_costs else problem
    plans = feasible_plans(problem)
    stages = find_optimum(problem).stages
    used = {stage.device_type for stage in stages}

    flip = next_price_flip(problem, stages)

    expected = {}
    for name in problem.device_types:
        farthest = MOST_FACTOR if name in used else 1 / MOST_FACTOR
        found = first_factor_by_trying_all(problem, plans, name, placement_of(stages), farthest)
        if found is not None and max(found[1], 1 / found[1]) < MOST_FACTOR:
            expected[name] = found
    if not expected:
        assert flip is None
        return
    distances = {name: abs(math.log(found[1])) for name, found in expected.items()}
    nearest, step = flip.device_type, math.log(MOST_FACTOR) / NUM_FACTORS
    assert distances[nearest] <= min(distances.values()) + step  # of two types one rises as the other falls
    assert flip.is_used == (nearest in used)
    low, high = sorted(expected[nearest])
    assert low * (1 - 1e-9) <= flip.flip_usd_per_hour / flip.price_usd_per_hour <= high * (1 + 1e-9)
    assert placement_of(flip.stages) != placement_of(stages)
    # Beyond the flip the named plan is the cheaper of the two.
    beyond = with_price(problem, flip.device_type, expected[nearest][1])
    assert evaluate(beyond, flip.stages).cost_usd < evaluate(beyond, stages).cost_usd


def test_the_price_is_that_of_the_size_with_the_cheapest_unit():
    problem = tiny_problem(1, max_units=8)
    stages = find_optimum(problem).stages
    name = stages[0].device_type
    unit = problem.device_types[name]
    price = unit.price_usd_per_hour
    # In pairs a unit costs what it costs alone today, in singles a tenth more.
    sizes = (
        InstanceSize(name="single", units=1, price_usd_per_hour=1.1 * price),
        InstanceSize(name="pair", units=2, price_usd_per_hour=2 * price),
    )
    sold = replace(problem, device_types={**problem.device_types, name: replace(unit, instances=sizes)})

    found = next_price_flip(sold, find_optimum(sold).stages)

    assert found.device_type == name
    assert (found.offer, found.price_usd_per_hour) == ("pair", pytest.approx(2 * price))
