from dataclasses import replace

import pytest

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.scheduling_problem import LayerCosts, SchedulingProblem, UnitType
from heterps_core.planning.provisioning.replica_balance import LayerRun, balance_replicas
from heterps_core.provisioning.fixed_ratio import static_ratio_replicas, static_server_ratio_replicas
from tests.builders import make_problem

RUNS = [LayerRun(0, 0, "cpu"), LayerRun(1, 1, "gpu"), LayerRun(2, 2, "cpu")]


@pytest.fixture
def three_stages() -> SchedulingProblem:
    """Tables on CPU, a dense layer on GPU, a dense layer on CPU; everything parallel, nothing to move.

    On one unit a batch takes 12, 4 and 2 seconds; the floor asks for 1 second, so for 12, 4 and 2 units.
    """
    unit = UnitType(
        price_usd_per_hour=1.0,
        max_units=100,
        memory_bytes=1e9,
        bandwidth_bytes_per_s=1e9,
        compute_parallel_fraction=1.0,
        communication_parallel_fraction=1.0,
    )
    layers = [
        LayerCosts(
            name=f"layer_{index}",
            kind="any",
            is_sharded=index == 0,
            state_bytes=0,
            output_bytes_per_sample=0,
            compute_seconds={"cpu": seconds, "gpu": seconds},
            communication_seconds={"cpu": 0.0, "gpu": 0.0},
        )
        for index, seconds in enumerate([12.0, 4.0, 2.0])
    ]
    return SchedulingProblem(
        model="three stages",
        batch_size=100,
        profile_batch_size=100,
        num_samples=1e6,
        num_epochs=1,
        throughput_floor_samples_per_s=100,
        layers=tuple(layers),
        device_types={"cpu": unit, "gpu": replace(unit, price_usd_per_hour=10.0)},
    )


def counts(stages):
    return [stage.num_replicas for stage in stages]


def test_the_ratio_of_cores_to_accelerators_is_kept(three_stages):
    # By hand: n GPUs and 6 n cores a stage; the GPU stage needs n = 4.
    assert counts(static_ratio_replicas(three_stages, RUNS)) == [24, 4, 24]


def test_servers_stand_in_proportion_to_all_workers(three_stages):
    # By hand: n GPUs, 6 n cores that compute, 7 n that hold tables; n = 4.
    assert counts(static_server_ratio_replicas(three_stages, RUNS)) == [28, 4, 24]


def test_the_stage_that_needs_most_sets_the_scale(three_stages):
    runs = [LayerRun(0, 0, "cpu"), LayerRun(1, 2, "gpu")]

    # By hand: the tables need 12 cores, the GPU stage 6 units. One server for each GPU makes n = 12.
    assert counts(static_ratio_replicas(three_stages, runs)) == [36, 6]
    assert counts(static_server_ratio_replicas(three_stages, runs)) == [12, 12]


def test_servers_without_workers_count_for_themselves(three_stages):
    # All 18 seconds on cores that also hold the tables.
    assert counts(static_server_ratio_replicas(three_stages, [LayerRun(0, 2, "cpu")])) == [18]
    assert counts(static_ratio_replicas(three_stages, [LayerRun(0, 2, "cpu")])) == [18]


def test_without_a_floor_memory_sets_the_scale(three_stages):
    tables = replace(three_stages.layers[0], state_bytes=13e9)
    problem = replace(
        three_stages, layers=(tables, *three_stages.layers[1:]), throughput_floor_samples_per_s=0
    )

    # 13 cores of 1 GB hold the tables; 6 n >= 13 for n = 3.
    assert counts(static_ratio_replicas(problem, RUNS)) == [18, 3, 18]


@pytest.mark.parametrize("provision", [static_ratio_replicas, static_server_ratio_replicas])
def test_a_cap_that_the_ratio_breaks_is_named_though_other_counts_keep_it(three_stages, provision):
    cpu = replace(three_stages.device_types["cpu"], max_units=30)
    problem = replace(three_stages, device_types={**three_stages.device_types, "cpu": cpu})

    assert evaluate(problem, balance_replicas(problem, RUNS)).is_feasible
    with pytest.raises(InfeasiblePlanError, match=r"units cap: Sta.* units of cpu, but max_units is 30"):
        provision(problem, RUNS)


@pytest.mark.parametrize("provision", [static_ratio_replicas, static_server_ratio_replicas])
def test_a_floor_that_a_stage_cannot_reach_is_named(three_stages, provision):
    fast = replace(three_stages, throughput_floor_samples_per_s=100_000)

    with pytest.raises(InfeasiblePlanError, match="throughput floor: the highest reachable throughput"):
        provision(fast, RUNS)


@pytest.mark.parametrize("provision", [static_ratio_replicas, static_server_ratio_replicas])
@pytest.mark.parametrize("seed", range(5))
def test_counts_are_feasible_and_never_cheaper_than_whole_ones(seed, provision):
    problem = make_problem(seed, num_layers=6, num_types=3, floor_samples_per_s=2_000, max_units=3_000)
    runs = [LayerRun(0, 2, "cpu"), LayerRun(3, 5, "gpu_a")]

    evaluation = evaluate(problem, provision(problem, runs))

    assert evaluation.is_feasible
    least_usd = evaluate(problem, balance_replicas(problem, runs)).cost_usd
    assert evaluation.cost_usd >= least_usd * (1 - 1e-12)
