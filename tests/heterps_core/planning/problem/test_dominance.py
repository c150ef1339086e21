"""A place that is left out of a search has no plan that costs less, tried over all plans of small problems."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.dominance import costs_no_less
from heterps_core.planning.problem.extra_costs import ExtraCosts, InstanceSize
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem

NUM_LAYERS, MOST_REPLICAS = 3, 3
COSTS = ExtraCosts(startup_seconds=120.0, checkpoint_seconds=1.0, restart_seconds=130.0)


def sized(problem, random, *, factor=lambda: 1.0):
    """Return the problem whose units are sold in ones and fours, with prices times drawn factors."""
    units = {}
    for name, unit in problem.device_types.items():
        prices = {1: unit.price_usd_per_hour * 1.1 * factor(), 4: unit.price_usd_per_hour * 4 * factor()}
        sizes = tuple(
            InstanceSize(name=f"{name}.{n}", units=n, price_usd_per_hour=usd) for n, usd in prices.items()
        )
        least = min(usd / n for n, usd in prices.items())
        is_spot = name == "gpu_a"
        units[name] = replace(
            unit,
            price_usd_per_hour=least,
            instances=sizes,
            on_demand_instances=tuple(
                replace(size, price_usd_per_hour=3 * size.price_usd_per_hour) for size in sizes
            )
            if is_spot
            else None,
            interruptions_per_hour=0.05 * factor() if is_spot else 0.0,
        )
    return replace(problem, device_types=units, extra_costs=COSTS)


def all_plans(problem):
    """Yield all plans of few replicas whose neighbouring stages differ in type."""
    for types in product(problem.device_types, repeat=NUM_LAYERS):
        starts = [0, *(i for i in range(1, NUM_LAYERS) if types[i] != types[i - 1])]
        bounds = list(zip(starts, [*(start - 1 for start in starts[1:]), NUM_LAYERS - 1], strict=True))
        for counts in product(range(1, MOST_REPLICAS + 1), repeat=len(bounds)):
            yield [
                Stage(first, last, types[first], count)
                for (first, last), count in zip(bounds, counts, strict=True)
            ]


@pytest.mark.parametrize("seed", range(4))
def test_where_a_place_costs_no_less_no_plan_of_it_does(seed):
    random = np.random.default_rng(seed)
    drawn = make_problem(seed, num_layers=NUM_LAYERS, num_types=2, floor_samples_per_s=0.0)
    here = sized(drawn, random)
    costlier = sized(drawn, random, factor=lambda: 1 + float(random.choice([0.0, 0.3])))
    costlier = replace(costlier, extra_costs=replace(COSTS, startup_seconds=150.0, crossing_usd=0.2))

    assert costs_no_less(costlier, here)
    assert not costs_no_less(here, costlier)
    plans = list(all_plans(here))
    assert all(evaluate(costlier, plan).cost_usd >= evaluate(here, plan).cost_usd for plan in plans)
    assert find_optimum(costlier).cost_usd >= find_optimum(here).cost_usd


def test_equal_places_cost_no_less_than_each_other():
    problem = sized(make_problem(0, num_layers=2, num_types=2), np.random.default_rng(0))

    assert costs_no_less(problem, problem)


def cheaper_size(unit):
    one, four = unit.instances
    return replace(unit, instances=(replace(one, price_usd_per_hour=0.99 * one.price_usd_per_hour), four))


@pytest.mark.parametrize(
    "change",
    [
        cheaper_size,
        lambda unit: replace(unit, max_units=unit.max_units + 1),
        lambda unit: replace(unit, memory_bytes=1.01 * unit.memory_bytes),
        lambda unit: replace(unit, reserved_bytes=1.0),
        lambda unit: replace(unit, interruptions_per_hour=0.5 * unit.interruptions_per_hour),
        lambda unit: replace(unit, instances=(replace(unit.instances[0], name="another"), unit.instances[1])),
        lambda unit: replace(unit, on_demand_instances=None),
    ],
    ids=["a cheaper size", "more units", "memory", "room", "interruptions", "another size", "no market"],
)
def test_a_place_that_may_have_a_cheaper_plan_is_searched(change):
    here = sized(make_problem(1, num_layers=2, num_types=2), np.random.default_rng(0))
    unit = change(here.device_types["gpu_a"])

    assert not costs_no_less(replace(here, device_types={**here.device_types, "gpu_a": unit}), here)


def test_a_lower_floor_another_type_or_a_lower_cost_is_searched_and_fewer_types_are_not():
    here = sized(make_problem(1, num_layers=2, num_types=2), np.random.default_rng(0))
    others = [
        replace(here, throughput_floor_samples_per_s=0.5 * here.throughput_floor_samples_per_s),
        replace(here, extra_costs=replace(COSTS, startup_seconds=100.0)),
        replace(here, num_samples=0.5 * here.num_samples),
    ]

    assert not any(costs_no_less(other, here) for other in others)
    assert costs_no_less(here.of_types(["cpu"]), here)
    assert not costs_no_less(here, here.of_types(["cpu"]))
