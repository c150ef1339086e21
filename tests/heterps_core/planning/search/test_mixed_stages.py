"""Plans with up to two device types a stage, against every plan of a second implementation of the step."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.explain.explanation import Detail, explain_plan
from heterps_core.planning.explain.text import explanation_text
from heterps_core.planning.problem.extra_costs import ExtraCosts, InstanceSize
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from heterps_core.planning.search.capped.capped_search import CappedSearch
from heterps_core.planning.search.capped.mixed_search import MixedSearch
from heterps_core.planning.search.optimum import find_optimum, highest_throughput, may_have_plan
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem, with_exchange_work
from tests.independent_planner import CandidateStages
from tests.paths import PROJECT
from tests.tiers import weekly_after


def few_units(seed):
    """Two or three device types of about the same speed, of which there are one to three units."""
    random = np.random.default_rng(seed)
    num_types = int(random.choice([2, 3]))
    problem = make_problem(seed, num_layers=5 - num_types, num_types=num_types, floor_samples_per_s=0.0)
    if seed % 2:
        problem = with_exchange_work(problem, seed)
    units = {
        name: replace(
            unit,
            max_units=int(random.integers(1, 6 - num_types)),
            price_usd_per_hour=float(random.uniform(0.5, 2)),
            memory_bytes=4e10,
        )
        for name, unit in problem.device_types.items()
    }
    layers = tuple(
        replace(
            layer,
            compute_seconds={
                name: layer.compute_seconds["cpu"] * float(random.uniform(0.3, 1.5))
                for name in layer.compute_seconds
            },
        )
        for layer in problem.layers
    )
    # A stage has CPUs or cards.
    name = "gpu_z" if seed % 4 else "cpu"
    units = {each.replace("cpu", name): unit for each, unit in units.items()}
    layers = tuple(renamed(layer, name) for layer in layers)
    return replace(
        problem,
        batch_size=64,
        profile_batch_size=64,
        layers=layers,
        device_types=units,
        step_model=StepModel.TRAINER,
        single_replica_communicates=False,
        mixes_device_types=True,
    )


def renamed(layer, name):
    fields = ("compute_seconds", "communication_seconds", "reading_seconds")
    values = {field: getattr(layer, field) for field in fields}
    return replace(
        layer,
        **{
            field: {each.replace("cpu", name): seconds for each, seconds in by_type.items()}
            for field, by_type in values.items()
        },
    )


def cheapest_by_trying(problem):
    """Return the costs of the cheapest plans with one device type a stage, and with up to two."""
    of_lengths = CandidateStages.of_every_length(problem).values()
    lone, mixed = zip(*(stages.mixed_brute_force() for stages in of_lengths), strict=True)
    return min(lone), min(mixed)


def searched(problem):
    """Return cost and bound in USD by the formula, and the stages."""
    found = MixedSearch(problem, CappedSearch(problem).run(), deadline=math.inf).run()
    cost_usd = objective_of(problem).cost_usd
    return cost_usd(found.product), cost_usd(found.lower_bound), found.stages or ()


def with_floor(problem, factor):
    return replace(problem, throughput_floor_samples_per_s=factor * highest_throughput(problem))


@pytest.mark.parametrize("factor", [0.0, 0.8])
@pytest.mark.parametrize("seed", weekly_after(6, [2, 10, 21, 23, 0, 5, *range(30, 60)]))
def test_equals_trying_every_plan_and_mixes_only_where_that_is_cheaper(seed, factor):
    problem = with_floor(few_units(seed), factor)
    lone_usd, expected_usd = cheapest_by_trying(problem)

    cost_usd, bound_usd, stages = searched(problem)

    assert cost_usd == pytest.approx(expected_usd, rel=1e-9)
    assert expected_usd * (1 - 1e-6) <= bound_usd <= expected_usd * (1 + 1e-9) or bound_usd == expected_usd
    is_mixed = any(stage.second_device_type for stage in stages)
    assert is_mixed == (expected_usd < lone_usd * (1 - 1e-9))


@pytest.mark.parametrize("seed", weekly_after(1, [0, 10, 21]))
def test_the_highest_throughput_is_that_of_plans_with_both_types(seed):
    problem = few_units(seed)
    highest = highest_throughput(problem)

    reached, missed = (cheapest_by_trying(with_floor(problem, factor))[1] for factor in (0.9999, 1.0001))
    assert math.isfinite(reached)
    assert math.isinf(missed)
    beyond = replace(problem, throughput_floor_samples_per_s=1.0001 * highest)
    assert may_have_plan(with_floor(problem, 0.99))
    assert not may_have_plan(beyond)
    with pytest.raises(InfeasiblePlanError, match=f"highest reachable throughput is {highest:.5g}"):
        find_optimum(beyond)


def test_a_plan_promises_what_its_evaluation_says():
    problem = with_floor(few_units(23), 0.7)

    found = find_optimum(problem)

    assert any(stage.second_device_type for stage in found.stages)
    evaluation = evaluate(problem, found.stages)
    assert evaluation.violations == ()
    assert found.cost_usd == evaluation.cost_usd
    assert find_optimum(problem, known=found.stages).cost_usd == found.cost_usd
    assert found.cost_usd < find_optimum(replace(problem, mixes_device_types=False)).cost_usd


EXTRA = ExtraCosts(
    startup_seconds=100.0,
    teardown_seconds=30.0,
    storage_usd_per_hour=0.2,
    checkpoint_seconds=20.0,
    restart_seconds=300.0,
)


def sold_in_sizes(problem, seed):
    """The last type on spot, all in machines of one or two units, one of which starts late and loads its tables."""
    random = np.random.default_rng(seed)
    units = {}
    for index, (name, unit) in enumerate(problem.device_types.items()):
        price = unit.price_usd_per_hour
        sizes = tuple(
            InstanceSize(name=f"{name}.{size}", units=size, price_usd_per_hour=price * size * (1 + size / 10))
            for size in (1, 2)
        )
        is_spot = index == len(problem.device_types) - 1
        units[name] = replace(
            unit,
            instances=sizes,
            price_usd_per_hour=price * 1.1,
            on_demand_instances=tuple(
                replace(size, price_usd_per_hour=2 * size.price_usd_per_hour) for size in sizes
            )
            if is_spot
            else None,
            interruptions_per_hour=0.02 if is_spot else 0.0,
            startup_seconds=float(random.uniform(0, 200)),
            load_seconds_per_byte=1e-9,
        )
    return replace(problem, device_types=units, extra_costs=EXTRA)


def all_mixed_plans(problem):
    """Yield every plan of one stage."""
    names, last = list(problem.device_types), problem.num_layers - 1
    for first in names:
        for count in range(1, problem.device_types[first].max_units + 1):
            yield (Stage(0, last, first, count),)
            for second in names[names.index(first) + 1 :]:
                if "cpu" in first + second:
                    continue
                for more in range(1, problem.device_types[second].max_units + 1):
                    yield (Stage(0, last, first, count + more, second, more),)


@pytest.mark.parametrize("seed", weekly_after(2, range(24)))
def test_no_plan_costs_less_than_the_bound_with_starts_interruptions_and_machines_of_several_units(seed):
    problem = few_units(seed)
    problem = sold_in_sizes(replace(problem, layers=problem.layers[:1]), seed)
    evaluations = [evaluate(problem, stages) for stages in all_mixed_plans(problem)]
    expected_usd = min(found.cost_usd for found in evaluations if not found.violations)

    found = find_optimum(problem)

    assert found.cost_usd == pytest.approx(expected_usd, rel=1e-9)
    assert 0.997 * expected_usd < found.cost_lower_bound_usd <= expected_usd * (1 + 1e-9)


def test_an_explanation_names_the_work_of_both_types_and_the_next_best_plan():
    problem = with_floor(few_units(23), 0.7)

    text = explanation_text(explain_plan(problem, find_optimum(problem).stages, detail=Detail.FULL))

    roles = [line for line in text.splitlines() if "layers 0..2 on " in line and "of the price" in line]
    assert {line.split()[0] for line in roles} == set(problem.device_types)
    assert "next best" in text


def test_stage_times_that_no_plan_keeps_are_left_out_before_a_plan_is_known():
    """Only units of both types together hold the tables, so the search begins without a plan."""
    problem = few_units(37)
    problem = sold_in_sizes(replace(problem, layers=problem.layers[:1]), 37)
    most = max(unit.max_units for unit in problem.device_types.values())
    held = problem.layers[0].state_bytes / (most + 0.5)
    units = {
        name: replace(unit, memory_bytes=unit.reserved_bytes + held)
        for name, unit in problem.device_types.items()
    }
    problem = replace(problem, device_types=units)
    evaluations = [evaluate(problem, stages) for stages in all_mixed_plans(problem)]
    expected_usd = min(found.cost_usd for found in evaluations if not found.violations)

    # A bound that is no number would end the search before all stage times were tried.
    with np.errstate(invalid="raise"):
        found = find_optimum(problem)

    assert found.cost_usd == pytest.approx(expected_usd, rel=1e-9)
    assert 0.97 * expected_usd < found.cost_lower_bound_usd <= expected_usd * (1 + 1e-9)


@pytest.mark.parametrize(
    ("max_units", "lone_usd", "mixed_usd", "units"),
    [
        (20, 8.3284, 5.9874, "20 x gpu-t4 + 15 x gpu-t4-20gbit"),
        pytest.param(30, 8.3284, 4.7406, "30 x gpu-t4 + 5 x gpu-t4-20gbit", marks=pytest.mark.weekly),
        pytest.param(8, 8.3284, 7.5569, "8 x gpu-t4 + 27 x gpu-t4-20gbit", marks=pytest.mark.weekly),
        pytest.param(64, 4.0809, 4.0809, "35 x gpu-t4", marks=pytest.mark.weekly),
    ],
)
def test_the_example_night_with_few_t4_costs_what_the_documents_say(max_units, lone_usd, mixed_usd, units):
    path = PROJECT / "docs" / "examples" / "night.problem.json"
    night = SchedulingProblem.from_json(json.loads(path.read_text()))
    few = replace(night.device_types["gpu-t4"], max_units=max_units)
    night = replace(
        night,
        throughput_floor_samples_per_s=1.2e6,
        device_types={**night.device_types, "gpu-t4": few},
    )

    lone, mixed = (find_optimum(replace(night, mixes_device_types=mixes)) for mixes in (False, True))

    assert (lone.cost_usd, mixed.cost_usd) == pytest.approx((lone_usd, mixed_usd), abs=1e-4)
    assert mixed.stages[0].units == units
    assert mixed.cost_lower_bound_usd == mixed.cost_usd
