"""Sizes and work of CTR-DNN worked by hand."""

from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import RowWiseAdagrad
from heterps_core.models.chain import build_chain
from heterps_core.models.model_graph import LayerKind
from heterps_core.models.tracing import trace_chain

FEATURES = FeatureSpec(num_dense=13, slot_rows=(1000,) * 26)


def test_ctr_dnn_has_the_sizes_of_its_picture():
    chain = build_chain("ctrdnn", FEATURES, seed=0)

    graph = trace_chain("ctrdnn", chain, dense_optimizer_values_per_parameter=2, row_optimizer=RowWiseAdagrad)
    embedding, first, relu, *_, output = graph.layers

    assert embedding.parameter_bytes == 26_000 * 16 * 4
    assert embedding.optimizer_state_bytes == 26_000 * 4
    assert embedding.is_sharded
    assert embedding.output_bytes_per_sample == (26 * 16 + 13) * 4
    assert embedding.looked_up_bytes_per_sample == 26 * 16 * 4
    assert first.kind is LayerKind.FULLY_CONNECTED
    assert first.forward_flops_per_sample == 2 * 429 * 400
    assert first.parameter_bytes == (429 * 400 + 400) * 4
    assert first.state_bytes == 3 * first.parameter_bytes
    assert (relu.kind, relu.state_bytes, relu.forward_flops_per_sample) == (LayerKind.ELEMENTWISE, 0, 0)
    assert (output.input_bytes_per_sample, output.output_bytes_per_sample) == (1600, 4)


def test_a_graph_changes_its_fingerprint_with_any_size():
    graphs = [
        trace_chain(
            "ctrdnn",
            build_chain("ctrdnn", FeatureSpec(num_dense=13, slot_rows=(rows,) * 26), seed=0),
            dense_optimizer_values_per_parameter=2,
            row_optimizer=RowWiseAdagrad,
        )
        for rows in (1000, 1000, 1001)
    ]

    assert graphs[0].fingerprint() == graphs[1].fingerprint() != graphs[2].fingerprint()
