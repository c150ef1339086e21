from dataclasses import replace

import numpy as np
import pytest

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.provisioning.replica_balance import LayerRun, balance_replicas, fixed_stages
from heterps_core.provisioning.continuous_newton import (
    balanced_stage_seconds,
    newton_replicas,
    replicas_within,
)
from tests.builders import make_problem

RUNS = [LayerRun(0, 0, "cpu"), LayerRun(1, 1, "gpu")]


def test_cheap_cores_are_added_until_the_dear_stage_is_no_longer_idle(two_stages):
    table = fixed_stages(two_stages, RUNS).table

    # By hand: the GPU takes 0.02 * 8 s; the CPU's communication 0.08 * 8 * (0.05 + 0.95 / k) s takes as long at
    # k = 4.75. Fewer cores leave the GPU idle, more would need a second GPU.
    assert balanced_stage_seconds(table, limit_seconds=0.2048) == pytest.approx(0.16, rel=1e-9)
    assert replicas_within(table, 0.16).value == pytest.approx([4.75, 1.0])
    assert [stage.num_replicas for stage in newton_replicas(two_stages, RUNS)] == [5, 1]


def test_a_stage_alone_stands_at_the_floor(two_stages):
    alone = replace(two_stages, layers=two_stages.layers[1:], throughput_floor_samples_per_s=100_000)
    table = fixed_stages(alone, [LayerRun(0, 0, "gpu")]).table

    # Its cost only rises with k. By hand: 0.99 * 0.16 / (0.04096 - 0.01 * 0.16) = 4.0244, so 5.
    assert balanced_stage_seconds(table, limit_seconds=0.04096) == pytest.approx(0.04096)
    assert replicas_within(table, 0.04096).value == pytest.approx([4.02439], rel=1e-5)
    [stage] = newton_replicas(alone, [LayerRun(0, 0, "gpu")])
    assert stage.num_replicas == 5


def test_a_fixed_cost_puts_the_optimum_at_the_square_root(two_stages):
    """With F USD per hour beside k units of price p, k = sqrt(alpha F / ((1 - alpha) p)) is best (closed form)."""
    first = replace(two_stages.layers[0], communication_seconds={"cpu": 0.0, "gpu": 0.0})
    second = replace(
        two_stages.layers[1],
        compute_seconds={"cpu": 1.0, "gpu": 1e-6},
        communication_seconds={"cpu": 1.0, "gpu": 0.0},
    )
    problem = replace(two_stages, layers=(first, second))

    x = balanced_stage_seconds(fixed_stages(problem, RUNS).table, limit_seconds=0.4)

    k = np.sqrt(0.97 * 2.42 / (0.03 * 0.04))
    assert x == pytest.approx(0.4 * (0.03 + 0.97 / k), rel=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_no_stage_time_on_a_fine_grid_is_cheaper(seed):
    problem = make_problem(seed, num_layers=6, num_types=3, floor_samples_per_s=2_000)
    runs = [LayerRun(0, 1, "gpu_a"), LayerRun(2, 3, "cpu"), LayerRun(4, 5, "gpu_b")]
    table = fixed_stages(problem, runs).table
    limit_seconds = problem.stage_seconds_limit

    def cost(x):
        """The continuous cost, written anew from the counts' formula."""
        rate = 0.0
        for c, d, a, b, price, memory in zip(
            table.compute_seconds,
            table.communication_seconds,
            table.compute_parallel_fraction,
            table.communication_parallel_fraction,
            table.price_usd_per_hour,
            table.memory_replicas,
            strict=True,
        ):
            if x <= c * (1 - a) or x <= d * (1 - b):
                return np.inf
            k = max(1, memory, c * a / (x - c * (1 - a)), d * b / (x - d * (1 - b)))
            rate += price * k
        return x * rate

    x = balanced_stage_seconds(table, limit_seconds=limit_seconds)
    slowest = table.seconds(np.maximum(table.memory_replicas, 1)).max()
    grid = np.geomspace(1e-3, 1, 4_000) * min(limit_seconds, slowest)

    assert x <= limit_seconds * (1 + 1e-9)
    assert cost(x) <= min(map(cost, grid)) * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_rounded_counts_are_feasible_and_never_cheaper_than_whole_ones(seed):
    problem = make_problem(seed, num_layers=6, num_types=3, floor_samples_per_s=2_000)
    runs = [LayerRun(0, 1, "gpu_a"), LayerRun(2, 3, "cpu"), LayerRun(4, 5, "gpu_b")]

    evaluation = evaluate(problem, newton_replicas(problem, runs))

    assert evaluation.is_feasible
    least_usd = evaluate(problem, balance_replicas(problem, runs)).cost_usd
    assert evaluation.cost_usd >= least_usd * (1 - 1e-12)


def test_a_floor_that_a_stage_cannot_reach_is_named(two_stages):
    fast = replace(two_stages, throughput_floor_samples_per_s=1e6)

    with pytest.raises(InfeasiblePlanError, match=r"throughput floor: .* 107563 samples/s"):
        newton_replicas(fast, RUNS)
