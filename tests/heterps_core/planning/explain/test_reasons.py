from dataclasses import replace

import pytest

from heterps_core.device_types import hardware_of
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.explain.reasons import find_nearest, find_roles
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.plans.scheduling_plan import Stage
from tests.heterps_core.planning.explain.trying_all import feasible_plans, tiny_problem
from tests.tasks.builders import make_problem

STAGES = (Stage(0, 0, "cpu-c7i", 4), Stage(1, 2, "gpu-t4", 1))


def test_roles_by_hand():
    problem = make_problem()

    cpu, gpu = find_roles(problem, evaluate(problem, STAGES))

    assert (cpu.device_type, cpu.runs, cpu.num_units) == ("cpu-c7i", ((0, 0),), 4)
    assert cpu.price_share == pytest.approx(0.4 / 0.9)
    # 80 ms at 0.5 USD/hour on the gpu against 40 ms at 0.1 on the cpu.
    assert (cpu.next_type, cpu.next_cost_ratio) == ("gpu-t4", pytest.approx(10))
    assert cpu.next_time_ratio == pytest.approx(2)
    # 40 ms at 0.1 USD/hour against 8 ms at 0.5: the same price, at a fifth of the time.
    assert gpu.next_cost_ratio == pytest.approx(1)
    assert gpu.next_time_ratio == pytest.approx(5)
    assert (gpu.num_units, gpu.num_memory_bound_stages, gpu.state_bytes) == (1, 0, 2_000)


@pytest.mark.parametrize(("memory_bytes", "num_bound"), [(333.0, 1), (334.0, 0)])
def test_memory_sets_the_count_where_one_unit_less_does_not_hold_the_layers(memory_bytes, num_bound):
    # The embedding's 1,000 bytes are divided: 250 on each of 4 units, 333.3 on each of 3.
    problem = make_problem()
    small = replace(problem.device_types["cpu-c7i"], memory_bytes=memory_bytes)
    problem = replace(problem, device_types={**problem.device_types, "cpu-c7i": small})

    cpu, _ = find_roles(problem, evaluate(problem, STAGES))

    assert cpu.num_memory_bound_stages == num_bound


@pytest.mark.parametrize("seed", range(3))
def test_the_nearest_plans_are_the_cheapest_of_all_without_each_type(seed):
    problem = tiny_problem(seed)
    plans = feasible_plans(problem)
    stages = find_optimum(problem).stages
    cost_usd = evaluate(problem, stages).cost_usd

    nearest = find_nearest(problem, stages, cost_usd)

    without = {
        stage.device_type: [cost for placement, _, cost in plans if stage.device_type not in placement]
        for stage in stages
    }
    extra = {name: min(costs) - cost_usd for name, costs in without.items() if costs}
    assert {each.hardware: each.extra_usd for each in nearest} == pytest.approx(extra)
    assert [each.extra_usd for each in nearest] == sorted(each.extra_usd for each in nearest)
    for each in nearest:
        assert each.hardware not in {stage.device_type for stage in each.stages}


def test_types_of_one_processor_are_one_hardware():
    assert hardware_of("cpu-r6in-spot") == hardware_of("cpu-c6i") == "ice-lake"
    assert hardware_of("gpu-t4-20gbit") == hardware_of("gpu-t4") == "t4"
    assert hardware_of("gpu_a") == "gpu_a"


def test_a_type_that_has_no_alternative_has_no_next_one():
    problem = tiny_problem(0, num_types=1, max_units=60, floor_samples_per_s=0.0)
    stages = find_optimum(problem).stages

    [role] = find_roles(problem, evaluate(problem, stages))

    assert (role.next_type, role.next_cost_ratio) == ("", 0.0)
