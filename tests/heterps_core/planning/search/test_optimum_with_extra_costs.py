"""The optimum where start-up, storage, interruptions and whole instances are charged.

The reference tries every placement with every count of replicas, and adds up each plan's bill stage by stage.
"""

from dataclasses import replace
from itertools import groupby, product

import numpy as np
import pytest

from heterps_core.planning.cost_model.batch_rating import stages_of
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.problem.extra_costs import ExtraCosts, InstanceSize
from heterps_core.planning.provisioning.replica_balance import balance_replicas, with_replicas
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.plan_rater import PlanRater
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem
from tests.partitions import all_partitions
from tests.tiers import weekly_after

NUM_LAYERS, NUM_TYPES, MAX_REPLICAS = 4, 3, 6
NOTHING = ExtraCosts()
STARTUP = ExtraCosts(startup_seconds=300.0, teardown_seconds=60.0)
STORAGE = ExtraCosts(storage_usd_per_hour=0.7, search_and_profiling_usd=0.25)
SPOT = ExtraCosts(checkpoint_seconds=30.0, restart_seconds=240.0)
EVERYTHING = ExtraCosts(
    startup_seconds=200.0,
    teardown_seconds=30.0,
    search_and_profiling_usd=0.1,
    storage_usd_per_hour=0.2,
    checkpoint_seconds=20.0,
    restart_seconds=180.0,
)
ALL_COSTS = {
    "nothing": NOTHING,
    "start-up": STARTUP,
    "storage": STORAGE,
    "spot": SPOT,
    "everything": EVERYTHING,
}


def make_charged_problem(seed, extra_costs, *, max_units=MAX_REPLICAS, floor=0.0):
    """A small problem with types that are partly on spot, and are sold in sizes."""
    problem = make_problem(
        seed, num_layers=NUM_LAYERS, num_types=NUM_TYPES, max_units=max_units, floor_samples_per_s=floor
    )
    small_tables = tuple(replace(layer, state_bytes=layer.state_bytes / 20) for layer in problem.layers)
    random = np.random.default_rng(seed)
    units = {}
    for name, unit in problem.device_types.items():
        sizes = (
            InstanceSize(name="small", units=1, price_usd_per_hour=unit.price_usd_per_hour * 1.4),
            InstanceSize(name="large", units=4, price_usd_per_hour=unit.price_usd_per_hour * 4),
        )
        units[name] = replace(
            unit,
            interruptions_per_hour=float(random.choice([0.0, 0.02, 0.4])),
            instances=sizes if random.random() < 0.6 else (),
        )
    return replace(problem, layers=small_tables, device_types=units, extra_costs=extra_costs)


def every_plan(problem):
    """Yield all partitions with all replica counts within the caps of one stage."""
    for runs in all_partitions(problem):
        counts = [range(1, problem.device_types[name].max_units + 1) for _, _, name in runs]
        for replicas in product(*counts):
            yield tuple(Stage(*run, count) for run, count in zip(runs, replicas, strict=True))


def cheapest_by_trying(problem):
    evaluations = (evaluate(problem, stages) for stages in every_plan(problem))
    return min(evaluation.cost_usd for evaluation in evaluations if not evaluation.violations)


@pytest.mark.parametrize("seed", weekly_after(1, range(3)))
@pytest.mark.parametrize("name", ALL_COSTS)
def test_equals_trying_every_plan(name, seed):
    # Three replicas of each type keep the number of plans small; caps then bind often.
    problem = make_charged_problem(seed, ALL_COSTS[name], max_units=3)
    expected = cheapest_by_trying(problem)

    found = find_optimum(problem)

    assert found.cost_lower_bound_usd <= expected * (1 + 1e-9)
    assert expected * (1 - 1e-9) <= found.cost_usd
    if name in ("spot", "everything"):  # caps and interruptions together leave a gap
        assert found.cost_usd <= expected * 1.02
        assert found.cost_lower_bound_usd >= expected * 0.9
    else:
        assert found.cost_usd == pytest.approx(expected, rel=1e-9)
        assert found.cost_lower_bound_usd == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", weekly_after(1, range(3)))
@pytest.mark.parametrize("name", ALL_COSTS)
def test_bound_meets_the_cost_where_no_cap_binds(name, seed):
    problem = make_charged_problem(seed, ALL_COSTS[name], max_units=400, floor=20_000.0)

    found = find_optimum(problem)

    assert found.cost_lower_bound_usd == pytest.approx(found.cost_usd, rel=1e-6)
    # No placement with its best replicas is cheaper: all placements, replicas by the one-partition search.
    for runs in all_partitions(problem):
        stages = balance_replicas(problem, [Stage(*run, 1) for run in runs])
        cost_usd = evaluate(problem, stages).cost_usd
        assert found.cost_usd <= cost_usd * (1 + 1e-9)


@pytest.mark.parametrize("seed", weekly_after(1, range(4)))
@pytest.mark.parametrize("name", ALL_COSTS)
def test_replicas_of_one_partition_equal_trying_every_count(name, seed):
    problem = make_charged_problem(seed, ALL_COSTS[name], max_units=12)
    runs = [Stage(0, 1, "cpu", 1), Stage(2, 2, "gpu_a", 1), Stage(3, 3, "gpu_b", 1)]
    expected = min(
        evaluation.cost_usd
        for counts in product(range(1, 13), repeat=3)
        if not (evaluation := evaluate(problem, with_replicas(runs, np.array(counts)))).violations
    )

    stages = balance_replicas(problem, runs)

    assert evaluate(problem, stages).cost_usd == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ALL_COSTS)
def test_ratings_of_a_search_bracket_the_cost_of_every_placement(name):
    problem = make_charged_problem(5, ALL_COSTS[name], max_units=100, floor=10_000.0)
    plans = np.array(list(product(range(NUM_TYPES), repeat=NUM_LAYERS)))
    rater = PlanRater(problem, budget_evaluations=1_000)
    rating = rater.grid(1).rate(stages_of(plans, NUM_TYPES))
    objective = objective_of(problem)

    for plan, rated, bound in zip(plans, rating.products, rating.lower_bounds, strict=True):
        runs, first = [], 0
        for index, members in groupby(plan.tolist()):
            length = len(list(members))
            runs.append(Stage(first, first + length - 1, problem.device_type_names[index], 1))
            first += length
        cost_usd = evaluate(problem, balance_replicas(problem, runs)).cost_usd
        assert objective.cost_usd(bound) <= cost_usd * (1 + 1e-9)
        assert cost_usd * (1 - 1e-6) <= objective.cost_usd(rated) <= cost_usd * 1.05


def test_the_lines_of_the_bill_are_a_hand_worked_example():
    """Two stages, one on spot; all numbers round."""
    problem = make_charged_problem(0, EVERYTHING, max_units=8)
    stages = (Stage(0, 1, "cpu", 5), Stage(2, 3, "gpu_a", 2))
    evaluation = evaluate(problem, stages)
    lines = dict(evaluation.cost_lines)
    hours = evaluation.run_seconds / 3600
    cpu, gpu = problem.device_types["cpu"], problem.device_types["gpu_a"]

    bought = sum(
        {0: count * unit.price_usd_per_hour}.get(len(unit.instances), 0)
        or (5.4 if count == 5 else 2.8) * unit.price_usd_per_hour
        for unit, count in ((cpu, 5), (gpu, 2))
    )
    plain = 5 * cpu.price_usd_per_hour + 2 * gpu.price_usd_per_hour
    interruptions = 5 * cpu.interruptions_per_hour + 2 * gpu.interruptions_per_hour
    lost = (2 * 20 / 3600 * interruptions) ** 0.5 + 180 / 3600 * interruptions
    overhead = 230 / 3600
    hourly = bought + 0.2

    assert lines["compute"] == pytest.approx(hours * plain)
    assert lines["whole instances"] == pytest.approx(hours * (bought - plain))
    assert lines["start-up and teardown"] == pytest.approx(overhead * bought)
    assert lines["storage"] == pytest.approx(0.2 * (hours + overhead))
    assert lines["spot risk"] == pytest.approx(hours * lost * hourly)
    assert lines["search and profiling"] == 0.1
    assert evaluation.cost_usd == pytest.approx(sum(lines.values()))


MAY_BE_NOTHING = (
    "whole instances",
    "disks for tables",
    "reserved machines",
    "one machine on-demand",
    "spot risk",
    "transfer between regions",
)


def test_a_term_that_is_left_out_is_a_line_of_nothing():
    problem = make_charged_problem(1, EVERYTHING)
    stages = (Stage(0, 1, "cpu", 5), Stage(2, 3, "gpu_a", 2))
    for line, fields in {
        "start-up and teardown": ("startup_seconds", "teardown_seconds"),
        "storage": ("storage_usd_per_hour",),
        "spot risk": ("checkpoint_seconds", "restart_seconds"),
        "search and profiling": ("search_and_profiling_usd",),
    }.items():
        without = replace(problem, extra_costs=replace(EVERYTHING, **dict.fromkeys(fields, 0.0)))
        lines = dict(evaluate(without, stages).cost_lines)
        assert lines[line] == 0
        assert all(usd > 0 for name, usd in lines.items() if name not in (line, *MAY_BE_NOTHING))
