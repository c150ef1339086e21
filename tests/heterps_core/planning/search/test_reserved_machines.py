"""The optimum with reserved machines, against every plan with every way of giving the machines to its stages."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.extra_costs import InstanceSize, Reserved
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.plan_rater import PlanRater
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem
from tests.partitions import all_partitions
from tests.tiers import weekly_after

UNITS, MACHINES, MOST = 2, 2, 6
STORAGE_USD = 2.0


def reserved_problem(seed):
    """Two types sold by one and by four units; the first one on spot at times, with machines that both may share."""
    random = np.random.default_rng(seed)
    problem = make_problem(seed, num_layers=3, num_types=2, max_units=MOST, floor_samples_per_s=0.0)
    is_spot, is_shared = bool(seed % 2), bool(random.random() < 0.7)
    units = {}
    for index, (name, unit) in enumerate(problem.device_types.items()):
        price = unit.price_usd_per_hour
        sizes = [InstanceSize(name="small", units=1, price_usd_per_hour=price * 1.4)]
        sizes += [InstanceSize(name="large", units=4, price_usd_per_hour=price * 4)]
        steady = tuple(replace(size, price_usd_per_hour=size.price_usd_per_hour * 2) for size in sizes)
        units[name] = replace(
            unit,
            instances=tuple(sizes),
            on_demand_instances=steady if is_spot else None,
            reserved=Reserved(name="own", units=UNITS, count=MACHINES) if is_shared or index == 0 else None,
        )
    small = tuple(replace(layer, state_bytes=layer.state_bytes / 20) for layer in problem.layers)
    extra = replace(problem.extra_costs, storage_usd_per_hour=STORAGE_USD)
    return replace(problem, layers=small, device_types=units, extra_costs=extra)


def bought_usd(unit, num_units, is_steady):
    """The cheapest instances by trying all counts of large ones, one of them on-demand if so asked."""

    def cover(needed):
        small, large = (size.price_usd_per_hour for size in unit.instances)
        return min(count * large + max(0, needed - 4 * count) * small for count in range(3))

    if not is_steady or unit.on_demand_instances is None:
        return cover(num_units)
    steady = unit.on_demand_instances
    return min(size.price_usd_per_hour + cover(max(0, num_units - size.units)) for size in steady)


def least_price(problem, stages):
    """Try every division of the machines, and every stage for the one machine on-demand."""
    units = [problem.device_types[stage.device_type] for stage in stages]
    least = np.inf
    for shares in product(range(MACHINES + 1), repeat=len(stages)):
        if sum(shares) > MACHINES or any(
            n and not unit.reserved for n, unit in zip(shares, units, strict=True)
        ):
            continue
        has_steady = any(shares) or any(unit.on_demand_instances is None for unit in units)
        for steady in range(len(stages)):
            price = sum(
                bought_usd(
                    unit, max(0, stage.num_replicas - UNITS * share), index == steady and not has_steady
                )
                for index, (unit, stage, share) in enumerate(zip(units, stages, shares, strict=True))
            )
            least = min(least, price)
    return least


def every_plan(problem):
    for runs in all_partitions(problem):
        for replicas in product(range(1, MOST + 1), repeat=len(runs)):
            yield tuple(Stage(*run, count) for run, count in zip(runs, replicas, strict=True))


@pytest.mark.parametrize("seed", weekly_after(2, range(8)))
def test_equals_trying_every_plan_and_every_division_of_the_machines(seed):
    problem = reserved_problem(seed)
    costs = []
    for stages in every_plan(problem):
        found = evaluate(problem, stages)
        price = least_price(problem, stages)
        assert found.price_usd_per_hour == pytest.approx(price, rel=1e-6, abs=1e-7)
        if not found.violations:
            costs.append(found.run_seconds / 3600 * (price + STORAGE_USD))

    optimum = find_optimum(problem)

    assert optimum.cost_usd == pytest.approx(min(costs), rel=1e-6)
    assert min(costs) * 0.99 < optimum.cost_lower_bound_usd <= min(costs) * (1 + 1e-9)


def test_the_bill_has_a_line_for_what_they_save_and_a_search_takes_them_too():
    problem = reserved_problem(3)
    rater = PlanRater(problem, budget_evaluations=100)
    rater.rate(np.array(list(product(range(2), repeat=3))))
    found = evaluate(problem, rater.best_stages)

    assert dict(found.cost_lines)["reserved machines"] < 0
    assert found.cost_usd == pytest.approx(find_optimum(problem).cost_usd, rel=1e-6)
