from dataclasses import replace

import pytest

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.provisioning.replica_balance import balance_replicas
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.schedulers.base import runs_of
from heterps_core.planning.search.schedulers.brute_force import BruteForceScheduler
from heterps_core.planning.search.schedulers.greedy import GreedyScheduler
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem


def search(problem, budget_evaluations=1_000):
    return GreedyScheduler().search(problem, budget_evaluations=budget_evaluations, seed=0).plan


def on_one_type(problem, name):
    """The cost of a whole chain on one type, or infinity."""
    try:
        stages = balance_replicas(problem, [Stage(0, problem.num_layers - 1, name, 1)])
    except InfeasiblePlanError:
        return float("inf")
    return evaluate(problem, stages).cost_usd


@pytest.mark.parametrize("seed", range(6))
def test_two_layers_are_settled_as_by_hand(seed):
    problem = make_problem(seed, num_layers=2, num_types=3, floor_samples_per_s=1_000)
    first_alone = replace(problem, layers=problem.layers[:1])

    plan = search(problem)

    first = min(problem.device_types, key=lambda name: on_one_type(first_alone, name))
    costs = [on_one_type(problem, first)]
    for second in problem.device_types:
        if second != first:
            runs = [Stage(0, 0, first, 1), Stage(1, 1, second, 1)]
            costs.append(evaluate(problem, balance_replicas(problem, runs)).cost_usd)
    assert plan.stages[0].device_type == first
    assert plan.cost_usd == pytest.approx(min(costs), rel=1e-12)
    assert plan.num_evaluations == 2 * 3


def test_a_budget_for_every_layer_settles_each_by_itself():
    problem = make_problem(1_000, num_layers=16, num_types=4, max_units=400)

    plan = search(problem)
    shorter = search(replace(problem, layers=problem.layers[:15]))

    assert plan.num_evaluations == 16 * 4

    def types(plan):
        return [
            stage.device_type for stage in plan.stages for _ in range(stage.first_layer, stage.last_layer + 1)
        ]

    assert types(plan)[:15] == types(shorter)  # later layers change no earlier choice


def test_sticks_in_a_local_optimum():
    problem = make_problem(1_000, num_layers=16, num_types=4, max_units=400)

    assert search(problem).optimality_gap > 0.01


def test_the_last_choice_of_a_small_budget_settles_all_that_is_left():
    problem = make_problem(4, num_layers=7, num_types=3, floor_samples_per_s=2_000)

    single = search(problem, budget_evaluations=3)
    double = search(problem, budget_evaluations=8)

    assert single.cost_usd == pytest.approx(min(on_one_type(problem, name) for name in problem.device_types))
    assert single.num_evaluations == 3
    assert len(double.stages) <= 2
    assert double.num_evaluations == 6


def test_fewer_evaluations_than_types_try_the_first_types():
    problem = make_problem(4, num_layers=7, num_types=3, floor_samples_per_s=100)

    plan = search(problem, budget_evaluations=1)

    assert [stage.device_type for stage in plan.stages] == ["cpu"]
    assert plan.num_evaluations == 1


def test_says_where_it_is_stuck_though_a_plan_exists():
    # The first layer takes all of the only type that holds the second.
    problem = make_problem(0, num_layers=2, num_types=2, floor_samples_per_s=0)
    first, second = problem.layers
    cpu, gpu = problem.device_types["cpu"], problem.device_types["gpu_a"]
    heavy = {"is_sharded": True, "output_bytes_per_sample": 0.0}
    problem = replace(
        problem,
        layers=(
            replace(first, **heavy, state_bytes=30e9),
            replace(second, **{**heavy, "is_sharded": False}, state_bytes=20e9),
        ),
        device_types={
            "cpu": replace(cpu, memory_bytes=10e9, max_units=4, price_usd_per_hour=50.0),
            "gpu_a": replace(gpu, memory_bytes=25e9, max_units=2, price_usd_per_hour=0.1),
        },
    )

    assert find_optimum(problem).cost_usd > 0
    assert (
        BruteForceScheduler().search(problem, budget_evaluations=4, seed=0).plan.stages[0].device_type
        == "cpu"
    )
    with pytest.raises(
        InfeasiblePlanError, match=r"greedy has settled 1 layers in a way that no type can follow"
    ):
        search(problem)


def test_runs_join_neighbours_of_one_type():
    assert runs_of(["a", "a", "b", "a"]) == [Stage(0, 1, "a", 1), Stage(2, 2, "b", 1), Stage(3, 3, "a", 1)]


def test_layers_at_the_front_that_take_no_time_join_the_first_that_does():
    problem = make_problem(3, num_layers=4, num_types=2, floor_samples_per_s=1_000)
    idle = [
        replace(layer, compute_seconds=dict.fromkeys(layer.compute_seconds, 0.0))
        for layer in problem.layers[:2]
    ]

    plan = search(replace(problem, layers=(*idle, *problem.layers[2:])))

    assert plan.stages[0].last_layer >= 2
    assert plan.num_evaluations == 2 * 2
