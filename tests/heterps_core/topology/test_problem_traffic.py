import numpy as np
import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.planning.problem.scheduling_problem import LayerCosts, SchedulingProblem, UnitType
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.topology.problem_traffic import problem_traffic
from heterps_core.topology.rank_traffic import plan_traffic
from tests.heterps_core.topology.test_rank_traffic import GRAPH

BANDWIDTHS = {"cpu": 1e3, "gpu": 1e6}


def problem_of_graph(*, batch_size, profile_batch_size):
    """Seconds as a profile would give them whose links have the units' bandwidths and no latency."""

    def bytes_of_profiled_batch(layer):
        if layer.is_sharded:
            return 2 * layer.looked_up_bytes_per_sample * profile_batch_size
        # Once a step: the profiled batch bears its share.
        return 2 * layer.parameter_bytes * profile_batch_size / batch_size

    return SchedulingProblem(
        model=GRAPH.name,
        batch_size=batch_size,
        profile_batch_size=profile_batch_size,
        num_samples=1e6,
        num_epochs=1,
        throughput_floor_samples_per_s=0,
        layers=tuple(
            LayerCosts(
                name=layer.name,
                kind=layer.kind.value,
                is_sharded=layer.is_sharded,
                state_bytes=layer.state_bytes,
                output_bytes_per_sample=layer.output_bytes_per_sample,
                compute_seconds=dict.fromkeys(BANDWIDTHS, 1.0),
                communication_seconds={
                    name: bytes_of_profiled_batch(layer) / bandwidth for name, bandwidth in BANDWIDTHS.items()
                },
            )
            for layer in GRAPH.layers
        ),
        device_types={
            name: UnitType(
                price_usd_per_hour=1.0,
                max_units=100,
                memory_bytes=1e9,
                bandwidth_bytes_per_s=bandwidth,
                compute_parallel_fraction=1.0,
                communication_parallel_fraction=1.0,
            )
            for name, bandwidth in BANDWIDTHS.items()
        },
    )


@pytest.mark.parametrize(
    "stages",
    [
        [Stage(0, 0, "cpu", 2), Stage(1, 1, "gpu", 3)],
        [Stage(0, 0, "gpu", 5), Stage(1, 1, "cpu", 1)],
        [Stage(0, 1, "gpu", 4)],
        [Stage(0, 1, "cpu", 1)],
    ],
)
@pytest.mark.parametrize(("batch_size", "num_microbatches"), [(12, 2), (100, 1), (7, 3)])
def test_seconds_at_the_units_bandwidth_are_the_bytes_of_the_graph(stages, batch_size, num_microbatches):
    problem = problem_of_graph(batch_size=batch_size, profile_batch_size=5)

    found = problem_traffic(problem, stages, num_microbatches=num_microbatches)

    expected = plan_traffic(GRAPH, stages, batch_size=batch_size, num_microbatches=num_microbatches)
    assert found.replicas_per_stage == expected.replicas_per_stage
    assert found.device_types == expected.device_types
    assert np.allclose(found.bytes_per_step, expected.bytes_per_step, rtol=1e-12, atol=0)


def test_refuses_stages_that_leave_layers_out():
    problem = problem_of_graph(batch_size=12, profile_batch_size=5)

    with pytest.raises(ConfigurationError, match="end at 0"):
        problem_traffic(problem, [Stage(0, 0, "cpu", 1)], num_microbatches=1)
