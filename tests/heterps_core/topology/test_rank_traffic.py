import numpy as np
import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.models.model_graph import Layer, LayerKind, ModelGraph
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.topology.rank_traffic import plan_traffic


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
