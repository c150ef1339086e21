"""The optimum where machines are counted and each stage has its own, against every plan with its machines counted."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.extra_costs import InstanceSize
from heterps_core.planning.problem.scheduling_problem import StepModel
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.plan_rater import PlanRater
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem
from tests.partitions import all_partitions
from tests.tiers import weekly_after

UNITS, MACHINES = 3, 2


def counted_problem(seed, step_model):
    """Two kinds of machines with three units, two of each, at a price or free."""
    problem = make_problem(
        seed, num_layers=3, num_types=2, max_units=UNITS * MACHINES, floor_samples_per_s=0.0
    )
    price = float(np.random.default_rng(seed).choice([0.0, 0.7]))
    sizes = (InstanceSize(name="own.3", units=UNITS, price_usd_per_hour=price),)
    units = {
        name: replace(unit, machine_units=UNITS, instances=sizes, price_usd_per_hour=price / UNITS)
        for name, unit in problem.device_types.items()
    }
    small = tuple(replace(layer, state_bytes=layer.state_bytes / 20) for layer in problem.layers)
    extra = replace(problem.extra_costs, storage_usd_per_hour=1e-6)
    return replace(problem, layers=small, device_types=units, extra_costs=extra, step_model=step_model)


def cheapest_by_trying(problem):
    """Try every plan with two machines of a kind at most, whatever the cost model says of caps."""
    costs = []
    for runs in all_partitions(problem):
        for replicas in product(range(1, UNITS * MACHINES + 1), repeat=len(runs)):
            stages = tuple(Stage(*run, count) for run, count in zip(runs, replicas, strict=True))
            machines = Counter()
            for stage in stages:
                machines[stage.device_type] += (stage.num_replicas + UNITS - 1) // UNITS
            is_there = max(machines.values()) <= MACHINES
            found = evaluate(problem, stages)
            assert is_there == all(each.constraint != "units cap" for each in found.violations)
            if is_there and not found.violations:
                costs.append(found.cost_usd)
    return min(costs, default=np.inf)


@pytest.mark.parametrize("seed", weekly_after(1, range(6)))
def test_equals_trying_every_plan_of_whole_machines(seed):
    problem = counted_problem(seed, StepModel.PAPERS)
    expected = cheapest_by_trying(problem)

    found = find_optimum(problem)

    assert found.cost_usd == pytest.approx(expected, rel=1e-6)
    assert expected * 0.99 < found.cost_lower_bound_usd <= expected * (1 + 1e-9)


def test_a_method_that_rates_in_bulk_takes_no_machine_that_is_not_there():
    problem = counted_problem(1, StepModel.TRAINER)
    rater = PlanRater(problem, budget_evaluations=200)

    rater.rate(np.array(list(product(range(2), repeat=3))))

    assert rater.best_stages is not None
    assert not evaluate(problem, rater.best_stages).violations
