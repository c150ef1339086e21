"""Runs the layers of a stage in a given precision, and faster than one by one.

A fully connected layer and the ReLU or sigmoid after it run as one operation (a GELU needs a pass over memory, as its
gradient follows from its input), and layers that follow one another as one function of autograd. Parameters,
gradients and the stage's output are float32 in any precision; "bfloat16" multiplies in bfloat16.

Shapes: B rows, I and O inputs and outputs of a fully connected layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from heterps_core.compute_device import CPU
from heterps_core.data.batch import ClickBatch
from heterps_core.models.row_dropout import RowDropout
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.training.gradients.products import linear as linear_product
from heterps_core.training.gradients.products import takes_onednn
from heterps_core.training.gradients.weight_gradients import WeightGradients
from heterps_core.training.pipeline.stage_graph import joined

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""In what dense layers multiply, for each of `PRECISIONS`."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Constants of glibc's malloc.h."""

_LARGEST_HEAP_BLOCK_BYTES = 2**25
"""Larger ones, such as tables, are still mapped on their own. The largest value that any glibc takes."""

_LARGEST_FREE_HEAP_BYTES = 2**29
"""More than a batch of activations; what is free beyond goes back to the system."""


def keep_freed_memory(*, shares_heap: bool = False) -> None:
    """Let this process use the memory of freed activations again instead of giving it back at each step.

    By default glibc returns large blocks to the system, and a step of CTR-DNN at batch 4096 touches 4,000 new pages;
    with this it touches a dozen. Elsewhere than on glibc nothing is changed.

    Args:
        shares_heap: All threads that begin later use one heap: what threads that read batches and sweep tables free
            would stay in heaps of their own.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK_BYTES)
        mallopt(M_TRIM_THRESHOLD, _LARGEST_FREE_HEAP_BYTES)
        if shares_heap:
            mallopt(M_ARENA_MAX, 1)


class StageLayers:
    """Consecutive layers of a chain as one function.

    A backward pass leaves the gradients of fully connected layers' parameters in `weight_gradients`; other
    parameters get theirs at once.

    Args:
        layers: In order; embeddings have their tables.
        precision: Name in `PRECISIONS`.
        puts_off: Let weight gradients wait; see `weight_gradients`.
    """

    def __init__(
        self, layers: Sequence[nn.Module], *, precision: str = "float32", puts_off: bool = True
    ) -> None:
        self.weight_gradients = WeightGradients(is_put_off=puts_off)
        self._dtype = DTYPES[precision]
        parts = [part for layer in layers for part in layer.modules()]
        self._dropouts = [part for part in parts if isinstance(part, RowDropout)]
        root, graph = joined(layers)
        for node in list(graph.nodes):
            linear = _linear_of(root, node)
            if linear is not None:
                self._fuse(root, node, linear)
        for node in list(graph.nodes):
            if node.op == "call_module" and isinstance(root.get_submodule(node.target), SlotEmbedding):
                # Anything but a product may need all the digits.
                has_products = all(_fused_at(root, user) is not None for user in node.users)
                node.kwargs = {"dtype": self._dtype if has_products else torch.float32}
                _share_towers(root, node)
        self._run = fx.GraphModule(root, graph).forward

    def __call__(
        self, batch: ClickBatch, activation_BW: Tensor | None, row_keys: Tensor | None = None
    ) -> Tensor:
        """Run the layers; takes what `run_layers` takes, and keys for dropout, and returns its result in float32."""
        for dropout in self._dropouts:
            dropout.row_keys = row_keys
        if self._dtype is torch.float32:
            return self._run(batch, activation_BW)  # type: ignore[no-any-return]
        with torch.autocast(batch.labels.device.type, self._dtype):
            leaving: Tensor = self._run(batch, activation_BW)
        return leaving.float()

    def _fuse(self, root: nn.Module, node: fx.Node, linear: nn.Linear) -> None:
        """Replace the call of a fully connected layer, and of an activation function that alone takes its result.

        A layer that alone takes the result of fused ones joins them.
        """
        end, activation = node, "none"
        if len(node.users) == 1:
            (user,) = node.users
            found = _activation_of(root, user)
            if found is not None:
                end, activation = user, found
        (entering,) = node.all_input_nodes
        before = _fused_at(root, entering) if len(entering.users) == 1 else None
        if before is None:
            path = f"{_FUSED}{node.name}"
            before = _FusedLinears(self._dtype, self.weight_gradients, linear.weight.device)
            root.add_module(path, before)
            with node.graph.inserting_before(node):
                entering = node.graph.call_module(path, node.args)
        before.calls.append(_LinearCall(linear, activation))
        end.replace_all_uses_with(entering)
        for replaced in dict.fromkeys((end, node)):
            node.graph.erase_node(replaced)


def _share_towers(root: nn.Module, looked_up: fx.Node) -> None:
    """Run fully connected layers over the look-up of some slots alone once for neighbours of the same ids.

    So the tower of a user runs once for all candidates of a request.
    """
    layer = root.get_submodule(str(looked_up.target))
    assert isinstance(layer, SlotEmbedding)
    if looked_up.args[1] is not None or layer.include_dense or len(layer.slots) == layer.features.num_slots:
        return
    for tower in [user for user in looked_up.users if _fused_at(root, user) is not None]:
        with looked_up.graph.inserting_before(tower):
            rows = looked_up.graph.call_function(_different_rows, (looked_up.args[0], layer.id_columns))
            tower.args = (looked_up.graph.call_function(_rows_at, (looked_up, rows, 0)),)
        with looked_up.graph.inserting_after(tower):
            given_back = looked_up.graph.call_function(_rows_at, (tower, rows, 1))
        tower.replace_all_uses_with(given_back)
        given_back.args = (tower, rows, 1)


_LARGEST_SHARE = 0.75
"""Of rows that differ from the one before, up to which copies of the rows pay."""


def _different_rows(batch: ClickBatch, id_columns: list[int]) -> tuple[Tensor, Tensor] | None:
    """Return the rows with other ids than the row before them, and which of these each row is like.

    None for most rows; and on a card, which would have to wait for their number.
    """
    ids_BK = batch.ids[:, id_columns]
    is_like_before = (ids_BK[1:] == ids_BK[:-1]).all(1)
    if ids_BK.device != CPU or len(is_like_before) * (1 - _LARGEST_SHARE) >= is_like_before.sum():
        return None
    is_other = F.pad(~is_like_before, (1, 0), value=True)
    return is_other.nonzero()[:, 0], is_other.cumsum(0) - 1


def _rows_at(values_BW: Tensor, rows: tuple[Tensor, Tensor] | None, place: int) -> Tensor:
    return values_BW if rows is None else values_BW.index_select(0, rows[place])


def general_layers(chain: nn.Sequential) -> tuple[str, ...]:
    """Return the layers that multiply by parameters outside of fully connected layers that can be fused.

    Autograd works their gradients out at once and one by one.
    """
    found = []
    for name, layer in chain.named_children():
        root, graph = joined([layer])
        linears = [linear for node in graph.nodes if (linear := _linear_of(root, node)) is not None]
        fused = {id(parameter) for linear in linears for parameter in linear.parameters()}
        if any(each.ndim > 1 and id(each) not in fused for each in layer.parameters()):
            found.append(name)
    return tuple(found)


_FUSED = "fused_"
"""Begins the names of calls that `StageLayers` puts in the place of fully connected layers."""


def _linear_of(root: nn.Module, node: fx.Node) -> nn.Linear | None:
    """Return the fully connected layer that a node calls: all it does must be torch's own product."""
    if node.op != "call_module" or len(node.args) != 1:
        return None
    module = root.get_submodule(str(node.target))
    is_plain = (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "weight" in module._parameters
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )
    return module if is_plain and isinstance(module, nn.Linear) else None


def _activation_of(root: nn.Module, node: fx.Node) -> str | None:
    """Return the name of an activation function that can run with a fully connected layer."""
    if len(node.all_input_nodes) != 1:
        return None
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if type(module) is nn.GELU:
            return f"gelu-{module.approximate}"
        return {nn.ReLU: "relu", nn.Sigmoid: "sigmoid"}.get(type(module))
    if node.op == "call_function" and node.target is F.gelu and len(node.args) == 1:
        return f"gelu-{node.kwargs.get('approximate', 'none')}"
    return _ACTIVATIONS.get(node.target)


_ACTIVATIONS: dict[object, str] = {
    torch.relu: "relu",
    F.relu: "relu",
    "relu": "relu",
    torch.sigmoid: "sigmoid",
    F.sigmoid: "sigmoid",
    "sigmoid": "sigmoid",
}
"""By the function, or the name of the tensor's method."""


class _LinearCall(NamedTuple):
    """A fully connected layer, which stays where it is, and the activation function after it."""

    linear: nn.Linear
    activation: str


class _FusedLinears(nn.Module):
    """Calls fully connected layers, each with an activation function, one after the other."""

    def __init__(self, dtype: torch.dtype, weight_gradients: WeightGradients, device: torch.device) -> None:
        super().__init__()
        self.calls: list[_LinearCall] = []
        self.dtype, self.weight_gradients = dtype, weight_gradients
        # Autograd calls a function's backward only where an input needs a gradient.
        self._anchor = torch.zeros(0, requires_grad=True, device=device)

    def forward(self, input_XI: Tensor) -> Tensor:
        alone = self.calls[0].linear
        if self._is_torchs and input_XI.ndim == 2 and not takes_onednn(input_XI, alone.weight):
            return alone(input_XI)  # type: ignore[no-any-return]
        if input_XI.ndim == 2:
            return _Linears.apply(input_XI, self._anchor, self)  # type: ignore[no-any-return, no-untyped-call]
        first, last = self.calls[0].linear, self.calls[-1].linear
        flat_BO: Tensor = _Linears.apply(input_XI.reshape(-1, first.in_features), self._anchor, self)  # type: ignore[no-untyped-call]
        return flat_BO.reshape(*input_XI.shape[:-1], last.out_features)

    @property
    def _is_torchs(self) -> bool:
        """One layer whose products are those of torch: its own function takes a third of the time of `_Linears`."""
        is_bare = len(self.calls) == 1 and self.calls[0].activation == "none"
        return is_bare and self.dtype is torch.float32 and not self.weight_gradients.is_put_off


def _fused_at(root: nn.Module, node: fx.Node) -> _FusedLinears | None:
    """Return the fused layers that a node calls."""
    module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
    return module if isinstance(module, _FusedLinears) else None


class _Linears(torch.autograd.Function):
    """Fully connected layers and their activation functions; the gradients of the parameters are put off.

    One function for all: each costs 30 microseconds, as long as a product of 32 rows.
    """

    @staticmethod
    def forward(ctx: Any, input_BI: Tensor, anchor: Tensor, fused: _FusedLinears) -> Tensor:
        ctx.fused, ctx.input_dtype = fused, input_BI.dtype
        entering, dtype = input_BI.to(fused.dtype), fused.dtype
        saved: list[Tensor | None] = []
        for linear, activation in fused.calls:
            weight_OI, bias_O = linear.weight.to(dtype), linear.bias
            kind, _, approximate = activation.partition("-")
            leaving = linear_product(
                entering,
                weight_OI,
                None if bias_O is None else bias_O.to(dtype),
                "none" if approximate else kind,
            )
            saved += (entering, weight_OI, None if activation == "none" else leaving)
            entering = F.gelu(leaving, approximate=approximate) if approximate else leaving
        ctx.save_for_backward(*saved)
        return entering

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        (gradient,) = gradients
        fused, saved = ctx.fused, ctx.saved_tensors
        for place in reversed(range(len(fused.calls))):
            linear, activation = fused.calls[place]
            input_BI, weight_OI, output_BO = saved[3 * place : 3 * place + 3]
            gradient = _gradient_before_activation(activation, gradient, output_BO)
            fused.weight_gradients.add(linear, gradient_BO=gradient, input_BI=input_BI)
            if place or ctx.needs_input_grad[0]:
                gradient = linear_product(gradient, weight_OI.t(), None, "none")
        return (gradient.to(ctx.input_dtype) if ctx.needs_input_grad[0] else None), None, None


def _gradient_before_activation(activation: str, gradient_BO: Tensor, saved_BO: Tensor | None) -> Tensor:
    """Return the gradient of what enters an activation function, which leaves `saved_BO`; of GELU what enters it."""
    aten = torch.ops.aten
    if activation == "relu":
        return aten.threshold_backward(gradient_BO, saved_BO, 0)  # type: ignore[no-any-return]
    if activation == "sigmoid":
        return aten.sigmoid_backward(gradient_BO, saved_BO)  # type: ignore[no-any-return]
    if activation.startswith("gelu"):
        return aten.gelu_backward(gradient_BO, saved_BO, approximate=activation.partition("-")[2])  # type: ignore[no-any-return]
    return gradient_BO
