from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.scheduling_problem import StepModel
from heterps_core.planning.provisioning.replica_balance import balance_replicas, with_replicas
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem
from tests.tiers import weekly_after

RUNS = [Stage(0, 0, "cpu", 1), Stage(1, 1, "gpu", 1)]


def test_whole_numbers_beat_the_rounded_continuous_solution(two_stages):
    stages = balance_replicas(two_stages, RUNS)
    rounded_up = evaluate(two_stages, [replace(RUNS[0], num_replicas=4), RUNS[1]])

    # Worked by hand: rounding up the closed form gives (4, 1) at $3.21940; one cheap core more pays.
    assert [stage.num_replicas for stage in stages] == [5, 1]
    assert evaluate(two_stages, stages).cost_usd == pytest.approx(2.84288, abs=5e-6)
    assert evaluate(two_stages, stages).throughput_samples_per_s == pytest.approx(25_600)
    assert rounded_up.cost_usd == pytest.approx(3.21940, abs=5e-6)


@pytest.mark.parametrize("seed", weekly_after(4, range(12)))
def test_equals_trying_all_replica_counts(seed):
    problem = make_problem(seed, num_layers=5, num_types=3, scarce=True, floor_samples_per_s=5_000)
    runs = [Stage(0, 1, "cpu", 1), Stage(2, 3, "gpu_a", 1), Stage(4, 4, "cpu", 1)]
    # All counts up to the caps, the 2 CPU stages sharing theirs.
    cpus, gpus = (problem.device_types[name].max_units for name in ("cpu", "gpu_a"))
    counts = [
        (a, b, c) for a, b, c in product(range(1, cpus), range(1, gpus + 1), range(1, cpus)) if a + c <= cpus
    ]
    costs = [
        evaluation.cost_usd
        for count in counts
        if not (evaluation := evaluate(problem, with_replicas(runs, np.array(count)))).violations
    ]

    if not costs:
        with pytest.raises(InfeasiblePlanError):
            balance_replicas(problem, runs)
    else:
        assert evaluate(problem, balance_replicas(problem, runs)).cost_usd == pytest.approx(
            min(costs), rel=1e-12
        )


def test_names_the_highest_throughput_that_the_caps_allow(two_stages):
    fast = replace(two_stages, throughput_floor_samples_per_s=1e6)

    with pytest.raises(
        InfeasiblePlanError, match=r"throughput floor: .* 107563 samples/s, 89.2% below"
    ) as raised:
        balance_replicas(fast, RUNS)

    # Worked by hand: the CPU stage's communication with 100 units takes 0.08 * 8 * (0.05 + 0.95 / 100) s.
    assert raised.value.constraint == "throughput floor"


def test_names_memory_that_no_replica_count_helps(two_stages):
    first = replace(two_stages.layers[0], is_sharded=False, state_bytes=2e9)
    heavy = replace(two_stages, layers=(first, two_stages.layers[1]))

    with pytest.raises(InfeasiblePlanError, match=r"memory: layers 0\.\.0 keep 2e"):
        balance_replicas(heavy, RUNS)


def test_names_the_cap_that_memory_breaks(two_stages):
    first = replace(two_stages.layers[0], state_bytes=150e9)
    heavy = replace(two_stages, layers=(first, two_stages.layers[1]))

    with pytest.raises(InfeasiblePlanError, match="units cap: memory alone takes 150 units of cpu"):
        balance_replicas(heavy, RUNS)


def test_names_the_batch_size_where_memory_takes_more_replicas_than_a_microbatch_has_rows(two_stages):
    layers = tuple(
        replace(layer, is_sharded=True, state_bytes=30 * 10**9 * (index == 0))
        for index, layer in enumerate(two_stages.layers)
    )
    small = replace(
        two_stages,
        layers=layers,
        batch_size=64,
        throughput_floor_samples_per_s=0,
        step_model=StepModel.TRAINER,
    )

    # Two stages cut a batch of 64 rows into 4 micro-batches of 16; 30 GB take 30 replicas of 1 GB.
    with pytest.raises(
        InfeasiblePlanError, match=r"batch size: memory takes 30 replicas for layers 0\.\.0, .* 16 rows"
    ):
        balance_replicas(small, RUNS)
