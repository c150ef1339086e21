"""Parts of a traced model as layers of a chain: live tensors side by side in one buffer in, and such a buffer out.

A tensor that a later part needs travels through the parts between in columns of its own; `module_line` makes the
parts. Layers that run in one process need no buffer between them: `training/pipeline/stage_graph` joins them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

Shape = tuple[int, ...]
"""Sizes of a tensor's values for one row."""

_BODY = "body"


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor that is made on one side of a boundary and used on the other."""

    name: str
    """Name of the operation that makes it."""

    shape: Shape

    @property
    def width(self) -> int:
        """Values for one row."""
        return math.prod(self.shape)


class GraphBlock(nn.Module):
    """Some operations of a traced model.

    Args:
        root: The model, whose submodules and parameters the operations name.
        graph: A placeholder for each of `inputs`, and a tuple of `outputs`.
        inputs, outputs: In the order of columns.
        made_again: What an earlier part made too, as that is cheaper than to let it travel.
    """

    def __init__(
        self,
        root: nn.Module,
        graph: fx.Graph,
        *,
        inputs: Sequence[LiveTensor],
        outputs: Sequence[LiveTensor],
        made_again: Sequence[LiveTensor] = (),
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.made_again = tuple(inputs), tuple(outputs), tuple(made_again)
        self.add_module(_BODY, fx.GraphModule(root, graph))

    @property
    def graph(self) -> fx.Graph:
        """The operations, which name modules and parameters as the user's model does."""
        return self._body.graph

    def submodule_path(self, name: str) -> str:
        """Return where in this block something of the user's model is."""
        return f"{_BODY}.{name}"

    def leave_out(self, constants: Iterable[str]) -> None:
        """Leave constants out of checkpoints, which have them of an earlier part or do not need them."""
        for path in constants:
            holder, _, name = path.rpartition(".")
            self._body.get_submodule(holder)._non_persistent_buffers_set.add(name)

    def forward(self, packed_BW: Tensor) -> Tensor:
        """Return the outputs side by side [B, W'] for the inputs side by side [B, W]."""
        return pack(self._body(*unpack(packed_BW, [value.shape for value in self.inputs])))

    @property
    def _body(self) -> fx.GraphModule:
        body = self.get_submodule(_BODY)
        assert isinstance(body, fx.GraphModule)
        return body


def tensor_name(layer_name: str, layer: nn.Module, key: str) -> str:
    """Return the name of a layer's parameter or buffer in checkpoints and exported models.

    Of a traced model it is the name in the user's module, which no cut changes.

    Args:
        key: Of the layer's `state_dict`.
    """
    return key.removeprefix(f"{_BODY}.") if isinstance(layer, GraphBlock) else f"{layer_name}.{key}"


def unpack(packed_BW: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Return the tensors [B, *shape] that stand side by side in a buffer.

    Example:
        >>> [tuple(part.shape) for part in unpack(torch.zeros(2, 7), [(1,), (2, 3)])]
        [(2, 1), (2, 2, 3)]
    """
    widths = [math.prod(shape) for shape in shapes]
    parts = [packed_BW] if len(shapes) == 1 else torch.split(packed_BW, widths, 1)
    return [
        part if len(shape) == 1 else part.reshape(part.shape[0], *shape)
        for part, shape in zip(parts, shapes, strict=True)
    ]


def pack(values: Sequence[Tensor]) -> Tensor:
    """Return tensors [B, ...] side by side in one buffer [B, W]; a single one of two dimensions as it is."""
    flat = [value.unsqueeze(1) if value.ndim == 1 else value.flatten(1) for value in values]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)
