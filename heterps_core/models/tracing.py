"""From a chain of torch layers to a ModelGraph: sizes from the layers, work from one counted forward pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from heterps_core.embeddings.row_optimizers import RowOptimizer
from heterps_core.models.model_graph import Layer, LayerKind, ModelGraph
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.units import BYTES_PER_FLOAT32

TRACED_ROWS = 8
BYTES_PER_ROW_NUMBER = 8
BYTES_PER_DYNAMIC_ID = 16
"""Its key, how often it was seen, and on which day."""


def trace_chain(
    name: str,
    chain: nn.Sequential,
    *,
    dense_optimizer_values_per_parameter: int,
    row_optimizer: type[RowOptimizer],
) -> ModelGraph:
    """Describe a chain of layers.

    The chain starts with an embedding, and embeddings need no table; Adam has 2 values per dense parameter.
    """
    layers = []
    shape: tuple[int, ...] = (0,)
    for layer_name, module in chain.named_children():
        if isinstance(module, SlotEmbedding):
            layer = _embedding_layer(layer_name, module, row_optimizer)
            shape = (module.output_width,)
        else:
            layer, shape = _dense_layer(layer_name, module, shape, dense_optimizer_values_per_parameter)
        layers.append(layer)
    return ModelGraph(name=name, layers=tuple(layers))


def _embedding_layer(name: str, module: SlotEmbedding, row_optimizer: type[RowOptimizer]) -> Layer:
    # Lists count as full: what is reserved for them and sent of them at most.
    num_ids = len(module.id_columns)
    return Layer(
        name=name,
        kind=LayerKind.EMBEDDING,
        is_sharded=True,
        parameter_bytes=module.num_rows * module.dimension * BYTES_PER_FLOAT32,
        optimizer_state_bytes=module.num_rows
        * (
            row_optimizer.state_bytes_per_row(module.dimension)
            + BYTES_PER_DYNAMIC_ID * (module.ids is not None)
        ),
        input_bytes_per_sample=module.input_width * BYTES_PER_FLOAT32 + num_ids * BYTES_PER_ROW_NUMBER,
        output_bytes_per_sample=module.output_width * BYTES_PER_FLOAT32,
        forward_flops_per_sample=0.0,
        looked_up_bytes_per_sample=num_ids * module.dimension * BYTES_PER_FLOAT32,
    )


def _dense_layer(
    name: str, module: nn.Module, input_shape: tuple[int, ...], optimizer_values_per_parameter: int
) -> tuple[Layer, tuple[int, ...]]:
    counter = FlopCounterMode(display=False)
    was_training = module.training
    # In training mode a batch normalisation would learn from the zeros.
    module.eval()
    with torch.no_grad(), counter:
        output: Tensor = module(torch.zeros(TRACED_ROWS, *input_shape))
    module.train(was_training)
    flops = counter.get_total_flops() / TRACED_ROWS
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    output_shape = tuple(output.shape[1:])
    layer = Layer(
        name=name,
        kind=_dense_kind(has_products=flops > 0, has_parameters=num_parameters > 0),
        is_sharded=False,
        parameter_bytes=num_parameters * BYTES_PER_FLOAT32,
        optimizer_state_bytes=num_parameters * optimizer_values_per_parameter * BYTES_PER_FLOAT32,
        input_bytes_per_sample=math.prod(input_shape) * BYTES_PER_FLOAT32,
        output_bytes_per_sample=math.prod(output_shape) * BYTES_PER_FLOAT32,
        forward_flops_per_sample=flops,
        looked_up_bytes_per_sample=0,
    )
    return layer, output_shape


def _dense_kind(*, has_products: bool, has_parameters: bool) -> LayerKind:
    if has_products:
        return LayerKind.FULLY_CONNECTED
    return LayerKind.OTHER if has_parameters else LayerKind.ELEMENTWISE
