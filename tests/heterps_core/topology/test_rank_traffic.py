import numpy as np
import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.models.model_graph import Layer, LayerKind, ModelGraph
from heterps_core.planning.problem.scheduling_problem import LayerCosts, SchedulingProblem, UnitType
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.topology.rank_traffic import plan_traffic, problem_traffic


def layer(name, *, is_sharded, parameter_bytes, output_bytes_per_sample, looked_up_bytes_per_sample=0):
    return Layer(
        name=name,
        kind=LayerKind.EMBEDDING if is_sharded else LayerKind.FULLY_CONNECTED,
        is_sharded=is_sharded,
        parameter_bytes=parameter_bytes,
        optimizer_state_bytes=parameter_bytes,
        input_bytes_per_sample=0,
        output_bytes_per_sample=output_bytes_per_sample,
        forward_flops_per_sample=1.0,
        looked_up_bytes_per_sample=looked_up_bytes_per_sample,
    )


GRAPH = ModelGraph(
    name="small",
    layers=(
        layer(
            "embedding",
            is_sharded=True,
            parameter_bytes=10**6,
            output_bytes_per_sample=10,
            looked_up_bytes_per_sample=18,
        ),
        layer("tower", is_sharded=False, parameter_bytes=600, output_bytes_per_sample=4),
    ),
)


def test_counts_boundary_ring_and_exchange_by_hand():
    stages = [Stage(0, 0, "cpu", 2), Stage(1, 1, "gpu", 3)]

    traffic = plan_traffic(GRAPH, stages, batch_size=12, num_microbatches=2)

    assert traffic.replicas_per_stage == (2, 3)
    assert traffic.device_types == ("cpu", "cpu", "gpu", "gpu", "gpu")
    # Of 6 rows in a micro-batch a core has 3 and a card 2: 0-1 | 2 3 | 4-5. Two micro-batches, 10 bytes a row.
    assert traffic.bytes_per_step[:2, 2:].tolist() == [[40, 20, 0], [0, 20, 40]]
    assert (traffic.bytes_per_step[2:, :2] == traffic.bytes_per_step[:2, 2:].T).all()
    # Each core looks 6 of 12 samples up, half of whose 18 bytes the other owns; gradients go the other way.
    assert traffic.bytes_per_step[:2, :2].tolist() == [[0, 108], [108, 0]]
    # A ring of three: 2 * 2/3 * 600 from each to the next.
    assert traffic.bytes_per_step[2:, 2:].tolist() == [[0, 800, 0], [0, 0, 800], [800, 0, 0]]


def test_a_ring_of_two_carries_the_tensor_each_way_and_one_rank_nothing():
    pair = plan_traffic(GRAPH, [Stage(0, 1, "gpu", 2)], batch_size=1, num_microbatches=1).bytes_per_step
    alone = plan_traffic(GRAPH, [Stage(0, 1, "gpu", 1)], batch_size=1, num_microbatches=1).bytes_per_step

    exchanged_bytes = 2 * 18 / 4
    assert pair.tolist() == [[0, 600 + exchanged_bytes], [600 + exchanged_bytes, 0]]
    assert alone.tolist() == [[0]]


@pytest.mark.parametrize(("batch_size", "num_microbatches"), [(512, 4), (7, 3), (100, 1)])
def test_all_rows_cross_the_boundary_once_each_way(batch_size, num_microbatches):
    stages = [Stage(0, 0, "cpu", 5), Stage(1, 1, "gpu", 3)]

    traffic = plan_traffic(GRAPH, stages, batch_size=batch_size, num_microbatches=num_microbatches)

    assert np.sum(traffic.bytes_per_step[:5, 5:]) == 10 * batch_size


def test_refuses_stages_that_leave_layers_out():
    with pytest.raises(ConfigurationError, match="end at 0"):
        plan_traffic(GRAPH, [Stage(0, 0, "cpu", 1)], batch_size=1, num_microbatches=1)


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


def test_refuses_stages_of_a_problem_that_leave_layers_out():
    problem = problem_of_graph(batch_size=12, profile_batch_size=5)

    with pytest.raises(ConfigurationError, match="end at 0"):
        problem_traffic(problem, [Stage(0, 0, "cpu", 1)], num_microbatches=1)
