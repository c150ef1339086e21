from dataclasses import replace

import numpy as np
import pytest

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.extra_costs import ExtraCosts
from heterps_core.planning.simulate.plan_simulation import run_cost_usd
from tests.builders import make_problem
from tests.heterps_core.planning.simulate.builders import random_plan

EVERYTHING = ExtraCosts(
    startup_seconds=300.0,
    teardown_seconds=60.0,
    storage_usd_per_hour=0.4,
    checkpoint_seconds=5.0,
    restart_seconds=120.0,
    search_and_profiling_usd=1.5,
)


def slowed(problem, factor):
    """The same problem on machines that take `factor` times as long for everything."""

    def times(seconds):
        return {name: factor * value for name, value in seconds.items()}

    return replace(
        problem,
        layers=tuple(
            replace(
                layer,
                compute_seconds=times(layer.compute_seconds),
                communication_seconds=times(layer.communication_seconds),
            )
            for layer in problem.layers
        ),
        device_types={
            name: replace(unit, bandwidth_bytes_per_s=unit.bandwidth_bytes_per_s / factor)
            for name, unit in problem.device_types.items()
        },
    )


@pytest.mark.parametrize("factor", [1.0, 1.7, 12.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_longer_step_costs_what_slower_machines_would(seed, factor):
    drawn = make_problem(seed, num_layers=8, num_types=3)
    problem = replace(
        drawn,
        extra_costs=EVERYTHING,
        device_types={
            name: replace(unit, interruptions_per_hour=0.01 * (index + 1))
            for index, (name, unit) in enumerate(drawn.device_types.items())
        },
    )
    stages = random_plan(problem, np.random.default_rng(seed))
    evaluation = evaluate(problem, stages)
    step_seconds = factor * problem.batch_size / evaluation.throughput_samples_per_s

    found = run_cost_usd(problem, evaluation, step_seconds=step_seconds)

    assert found == pytest.approx(evaluate(slowed(problem, factor), stages).cost_usd)
