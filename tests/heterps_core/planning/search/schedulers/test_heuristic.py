from dataclasses import replace

import pytest

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.search.schedulers.heuristic import HeuristicScheduler, rule_of_thumb_plans
from tests.builders import make_problem


def with_sharded(problem, flags):
    layers = [replace(layer, is_sharded=flag) for layer, flag in zip(problem.layers, flags, strict=True)]
    return replace(problem, layers=tuple(layers))


def search(problem):
    return HeuristicScheduler().search(problem, budget_evaluations=1_000, seed=0).plan


def test_tables_go_to_the_cpu_and_the_rest_to_the_cheapest_accelerator():
    problem = make_problem(0, num_layers=5, num_types=4, floor_samples_per_s=100)
    problem = with_sharded(problem, [True, False, True, False, False])

    plan = search(problem)

    assert [(stage.first_layer, stage.last_layer) for stage in plan.stages] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 4),
    ]
    assert plan.stages[0].device_type == plan.stages[2].device_type == "cpu"
    assert plan.stages[1].device_type == plan.stages[3].device_type != "cpu"
    assert plan.num_evaluations == 3  # one CPU type, three accelerators


def test_the_first_layer_counts_as_data_intensive_where_no_layer_is_sharded():
    problem = with_sharded(make_problem(0, num_layers=4, num_types=2), [False] * 4)

    assert rule_of_thumb_plans(problem).tolist() == [[0, 1, 1, 1]]


def test_every_pair_of_a_cpu_type_and_an_accelerator_is_tried():
    problem = make_problem(0, num_layers=3, num_types=4)
    names = {"cpu": "cpu_a", "gpu_a": "gpu_a", "gpu_b": "CPU_b", "gpu_c": "gpu_c"}
    problem = replace(
        problem,
        layers=tuple(
            replace(
                layer,
                is_sharded=index == 1,
                compute_seconds={names[key]: value for key, value in layer.compute_seconds.items()},
                communication_seconds={
                    names[key]: value for key, value in layer.communication_seconds.items()
                },
            )
            for index, layer in enumerate(problem.layers)
        ),
        device_types={names[key]: unit for key, unit in problem.device_types.items()},
    )

    assert sorted(rule_of_thumb_plans(problem).tolist()) == [[1, 0, 1], [1, 2, 1], [3, 0, 3], [3, 2, 3]]


def test_a_problem_without_accelerators_is_reported_so():
    problem = make_problem(0, num_layers=3, num_types=1)

    with pytest.raises(InfeasiblePlanError, match=r"needs a CPU type and an accelerator type.* has cpu; use"):
        search(problem)


def test_a_floor_beyond_the_rule_is_explained_though_other_plans_reach_it():
    problem = make_problem(3, num_layers=5, num_types=2, floor_samples_per_s=1_000)
    slow = {"cpu": 10.0, "gpu_a": 0.001}
    tables = replace(problem.layers[0], is_sharded=True, state_bytes=1e9, compute_seconds=slow)
    problem = replace(problem, layers=(tables, *problem.layers[1:]), throughput_floor_samples_per_s=5_000)

    with pytest.raises(
        InfeasiblePlanError, match=r"throughput floor: by the rule of thumb with cpu and gpu_a, the highest"
    ):
        search(problem)
