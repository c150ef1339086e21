"""From a chain of torch layers to a ModelGraph: sizes from the layers, work from one counted pass in training mode.

Torch's fused paths hide products from its counter, so attention and recurrent layers are traced unfused. Work that
has no formula (operations of extensions, custom autograd functions without a counted product) is named by the graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

from heterps_core.embeddings.row_optimizers import RowOptimizer
from heterps_core.models.model_graph import Layer, LayerKind, ModelGraph
from heterps_core.models.slot_embedding import SlotEmbedding, share_sequences
from heterps_core.units import BYTES_PER_FLOAT32

_TRACED_ROWS = 8

_OWN_NAMESPACES = ("aten", "prim", "prims")

_WITHOUT_FORMULA = (
    "_cdist",
    "_fft",
    "_linalg",
    "_scaled_dot_product",
    "_transformer_encoder",
    "_native_multi_head_attention",
    "_trilinear",
    "cholesky",
    "fft",
    "linalg",
    "lu_",
    "quantized",
    "triangular_solve",
)
"""Torch's own operations that do more than move their tensors, and that its counter does not know."""

BYTES_PER_ROW_NUMBER = 8
_BYTES_PER_DYNAMIC_ID = 16
"""Its key, how often it was seen, and on which day."""


def _recurrent_flops(
    input_shape: Sequence[int], input_weight: Sequence[int], hidden_weight: Sequence[int], *_: Any, **__: Any
) -> int:
    """Return the operations of a recurrent layer's forward pass: two products for each row of each step."""
    return 2 * math.prod(input_shape[:-1]) * (math.prod(input_weight) + math.prod(hidden_weight))


def _recurrent_backward_flops(*shapes: Any, **named: Any) -> int:
    return 2 * _recurrent_flops(*shapes, **named)


_FORMULAS = {
    torch.ops.aten.mkldnn_rnn_layer: shape_wrapper(_recurrent_flops),  # type: ignore[no-untyped-call]
    torch.ops.aten.mkldnn_rnn_layer_backward: shape_wrapper(_recurrent_backward_flops),  # type: ignore[no-untyped-call]
}
"""Formulas of operations that torch's counter leaves out: LSTM on a CPU."""


def trace_chain(
    name: str,
    chain: nn.Sequential,
    *,
    dense_optimizer_values_per_parameter: int,
    row_optimizer: type[RowOptimizer],
    mean_lengths: Sequence[float] = (),
    rows_per_list: Sequence[float] = (),
) -> ModelGraph:
    """Describe a chain of layers.

    The chain starts with an embedding, and embeddings need no table; Adam has 2 values per dense parameter.

    Args:
        mean_lengths: Values of a row in each slot of the data, by which look-ups and packed sequences are counted; by
            default as many as there may be.
        rows_per_list: Rows that share the list of each slot in the mean, which packed sequences have once; by default
            1.
    """
    layers = []
    shared = [1] * len(mean_lengths)
    if rows_per_list and share_sequences(chain):
        shared = [max(round(rows), 1) for rows in rows_per_list]
    # All of whole lists.
    num_rows = math.lcm(*shared) * -(-_TRACED_ROWS // math.lcm(*shared))
    entering = torch.zeros(num_rows, 0)
    for layer_name, module in chain.named_children():
        if isinstance(module, SlotEmbedding):
            lengths = mean_lengths or module.features.slot_lengths
            of_sequences = [math.ceil(lengths[module.slots[place]]) for place in module.sequences]
            rows = shared or [1] * len(lengths)
            entering = module.example(
                num_rows, of_sequences, [rows[module.slots[place]] for place in module.sequences]
            )
            num_ids = sum(lengths[slot] / rows[slot] for slot in module.slots)
            layer = _embedding_layer(layer_name, module, row_optimizer, num_ids, entering.shape[1])
        else:
            layer, entering = _dense_layer(layer_name, module, entering, dense_optimizer_values_per_parameter)
        layers.append(layer)
    return ModelGraph(name=name, layers=tuple(layers))


def output_widths(chain: nn.Sequential) -> list[int]:
    """Return how many numbers of a sample leave each layer of a chain; layers run in evaluation mode."""
    widths, leaving = [], torch.zeros(_TRACED_ROWS, 0)
    for module in chain:
        if isinstance(module, SlotEmbedding):
            leaving = module.example(_TRACED_ROWS)
            widths.append(module.output_width)
        else:
            was_training = module.training
            with torch.no_grad():
                leaving = module.eval()(leaving)
            module.train(was_training)
            widths.append(math.prod(leaving.shape[1:]))
    return widths


def _embedding_layer(
    name: str, module: SlotEmbedding, row_optimizer: type[RowOptimizer], num_ids: float, width: int
) -> Layer:
    return Layer(
        name=name,
        kind=LayerKind.EMBEDDING,
        is_sharded=True,
        parameter_bytes=module.num_rows * module.dimension * BYTES_PER_FLOAT32,
        optimizer_state_bytes=module.num_rows
        * (module.state_bytes_per_row(row_optimizer) + _BYTES_PER_DYNAMIC_ID * (module.ids is not None)),
        input_bytes_per_sample=module.input_width * BYTES_PER_FLOAT32 + round(num_ids * BYTES_PER_ROW_NUMBER),
        output_bytes_per_sample=width * BYTES_PER_FLOAT32,
        forward_flops_per_sample=0.0,
        looked_up_bytes_per_sample=round(num_ids * module.dimension * BYTES_PER_FLOAT32),
    )


def _dense_layer(
    name: str, module: nn.Module, entering: Tensor, optimizer_values_per_parameter: int
) -> tuple[Layer, Tensor]:
    work = _traced_work(module, entering)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    layer = Layer(
        name=name,
        kind=_dense_kind(has_products=work.forward_flops > 0, has_parameters=num_parameters > 0),
        is_sharded=False,
        parameter_bytes=num_parameters * BYTES_PER_FLOAT32,
        optimizer_state_bytes=num_parameters * optimizer_values_per_parameter * BYTES_PER_FLOAT32,
        input_bytes_per_sample=math.prod(entering.shape[1:]) * BYTES_PER_FLOAT32,
        output_bytes_per_sample=math.prod(work.output_shape) * BYTES_PER_FLOAT32,
        forward_flops_per_sample=work.forward_flops,
        backward_flops_per_sample=(
            None if work.backward_flops == 2 * work.forward_flops else work.backward_flops
        ),
        looked_up_bytes_per_sample=0,
        uncounted=work.uncounted,
    )
    return layer, torch.zeros(len(entering), *work.output_shape)


class _Work(NamedTuple):
    """Work of a module for one sample in training; `output_shape` is that of a sample."""

    output_shape: tuple[int, ...]
    forward_flops: float
    backward_flops: float
    uncounted: tuple[str, ...]


def _traced_work(module: nn.Module, entering: Tensor) -> _Work:
    """Run a module forward and backward on an input; its state and the random numbers stay as they were."""
    operations = _Operations()
    before = {child: _plain_attributes(child) for child in module.modules()}
    buffers = {buffer: buffer.clone() for buffer in module.buffers()}
    unfused = sdpa_kernel(SDPBackend.MATH)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), unfused, operations:
        module.train()
        entering = entering.requires_grad_()
        # A copy, so that a layer may work in place.
        leaving: Tensor = module(entering.clone())
        forward_flops = operations.flops
        functions = _custom_functions(leaving)
        if leaving.requires_grad:
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            torch.autograd.grad(leaving.sum(), [entering, *trained], allow_unused=True)
    for child, plain in before.items():
        for name in _plain_attributes(child).keys() - plain.keys():
            del vars(child)[name]
        vars(child).update(plain)
    with torch.no_grad():
        for buffer, value in buffers.items():
            buffer.copy_(value)
    uncounted = operations.uncounted | (functions if forward_flops == 0 else set())
    return _Work(
        output_shape=tuple(leaving.shape[1:]),
        forward_flops=forward_flops / len(entering),
        backward_flops=(operations.flops - forward_flops) / len(entering),
        uncounted=tuple(sorted(uncounted)),
    )


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the mode of a module, and what it counts or notes itself."""
    return {name: value for name, value in vars(module).items() if isinstance(value, int | float | str)}


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations by torch's formulas, and notes those that may hold products without one.

    Torch's own counter, `FlopCounterMode`, loads its compiler first, for a second of processor time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.uncounted: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        operation = func.overloadpacket
        formula = _FORMULAS.get(operation) or flop_registry.get(operation)
        if formula is None:
            with self:
                parts = func.decompose(*args, **named)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **named)
        if formula is not None:
            self.flops += formula(*args, **named, out_val=result)
            return result
        namespace, _, name = func.name().partition("::")
        is_known = torch.Tag.reduction in func.tags
        if not is_known and (namespace not in _OWN_NAMESPACES or name.startswith(_WITHOUT_FORMULA)):
            self.uncounted.add(f"{namespace}::{name.partition('.')[0]}")
        return result


def _custom_functions(tensor: Tensor) -> set[str]:
    """Return the names of the custom autograd functions that made a tensor: what they run may be no torch."""
    found: set[str] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            found.add(type(node).__name__.removesuffix("Backward"))
        waiting += [following for following, _ in node.next_functions]
    return found


def _dense_kind(*, has_products: bool, has_parameters: bool) -> LayerKind:
    if has_products:
        return LayerKind.FULLY_CONNECTED
    return LayerKind.OTHER if has_parameters else LayerKind.ELEMENTWISE
