"""The optimum where the slowest start of a stage is charged for all machines, against trying every plan."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.extra_costs import ExtraCosts
from heterps_core.planning.provisioning.replica_balance import balance_replicas
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem
from tests.heterps_core.planning.search.test_optimum_with_extra_costs import every_plan
from tests.tiers import weekly_after

EXTRA = ExtraCosts(startup_seconds=90.0, teardown_seconds=30.0, storage_usd_per_hour=0.1)
MAX_UNITS = 4


def problem_with_starts(seed):
    """A short run, in which start-up is a good part of the bill: up to 600 s beside 100 to 1,000 s of steps."""
    problem = make_problem(seed, num_layers=3, num_types=3, max_units=MAX_UNITS, floor_samples_per_s=0.0)
    random = np.random.default_rng(seed)
    table_bytes = sum(layer.state_bytes for layer in problem.layers if layer.is_sharded)
    units = {
        name: replace(
            unit,
            memory_bytes=1e15,
            startup_seconds=float(random.choice([0.0, 40.0, 300.0])),
            load_seconds_per_byte=float(random.uniform(0, 600) / max(table_bytes, 1.0)),
        )
        for name, unit in problem.device_types.items()
    }
    problem = replace(problem, device_types=units, extra_costs=EXTRA)
    seconds = evaluate(problem, [Stage(0, 2, "gpu_a", 2)]).run_seconds
    return replace(problem, num_samples=problem.num_samples * 300 / seconds)


def bill(problem, evaluation):
    """The bill by hand: all machines from the common start to the last step, and while the slowest loads."""
    starts = []
    for stage in (part.stage for part in evaluation.stages):
        unit = problem.device_types[stage.device_type]
        layers = problem.layers[stage.first_layer : stage.last_layer + 1]
        shard = sum(layer.state_bytes for layer in layers if layer.is_sharded) / stage.num_replicas
        starts.append(unit.startup_seconds + unit.load_seconds_per_byte * shard)
    hours = (evaluation.run_seconds + 120.0 + max(starts)) / 3600
    return hours * (evaluation.price_usd_per_hour + 0.1)


def cheapest(problem, plans):
    evaluations = (evaluate(problem, stages) for stages in plans)
    return min(bill(problem, each) for each in evaluations if not each.violations)


@pytest.mark.parametrize("seed", weekly_after(2, range(24)))
def test_equals_trying_every_plan(seed):
    problem = problem_with_starts(seed)
    expected = cheapest(problem, every_plan(problem))

    found = find_optimum(problem)

    assert found.cost_usd == pytest.approx(bill(problem, evaluate(problem, found.stages)), rel=1e-9)
    assert found.cost_usd == pytest.approx(expected, rel=1e-9)
    assert found.cost_lower_bound_usd == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", weekly_after(2, range(12)))
def test_replicas_of_one_partition_equal_trying_every_count(seed):
    problem = problem_with_starts(seed)
    runs = [(0, 0, "cpu"), (1, 2, "gpu_a")]
    counts = product(range(1, MAX_UNITS + 1), repeat=2)
    plans = [[Stage(*run, count) for run, count in zip(runs, pair, strict=True)] for pair in counts]

    found = evaluate(problem, balance_replicas(problem, plans[0]))

    assert bill(problem, found) == pytest.approx(cheapest(problem, plans), rel=1e-9)
