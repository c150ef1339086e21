"""The layers of a stage as one graph of calls, in which parts of a traced model exchange tensors as they are.

Only what enters and leaves the stage is packed in one buffer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from torch import fx, nn

from heterps_core.models.graph_block import GraphBlock, LiveTensor, pack, unpack
from heterps_core.models.slot_embedding import SlotEmbedding


def joined(layers: Sequence[nn.Module]) -> tuple[nn.Module, fx.Graph]:
    """Return what holds the modules of layers, and a graph of calls that takes a batch and an activation.

    The activation [B, W] is None at the start of a chain; the graph returns that after the last layer.
    """
    root = nn.ModuleList(layers)
    graph = fx.Graph()
    batch, activation = graph.placeholder("batch"), graph.placeholder("activation")
    live: dict[str, fx.Node] = {}
    first, last = layers[0], layers[-1]
    if isinstance(first, SlotEmbedding | GraphBlock) and first.inputs:
        packed = graph.call_function(unpack, (activation, [value.shape for value in first.inputs]))
        for place, value in enumerate(first.inputs):
            live[value.name] = graph.call_function(operator.getitem, (packed, place))
    for number, layer in enumerate(layers):
        if isinstance(layer, GraphBlock):
            _add_block(graph, str(number), layer, live)
        elif isinstance(layer, SlotEmbedding):
            if layer.outputs:
                live[layer.outputs[-1].name] = graph.call_module(str(number), (batch, None))
            else:
                activation = graph.call_module(str(number), (batch, activation))
        else:
            for path in _parts(str(number), layer):
                activation = graph.call_module(path, (activation,))
    if isinstance(last, SlotEmbedding | GraphBlock) and last.outputs:
        activation = graph.call_function(pack, (_nodes_of(last.outputs, live),))
    graph.output(activation)
    return root, graph


def _parts(path: str, layer: nn.Module) -> Iterator[str]:
    """Yield the layers within a Sequential."""
    if type(layer) is nn.Sequential:
        for name, part in layer.named_children():
            yield from _parts(f"{path}.{name}", part)
    else:
        yield path


def _add_block(graph: fx.Graph, path: str, block: GraphBlock, live: dict[str, fx.Node]) -> None:
    copies: dict[fx.Node, fx.Node] = {}
    entering = iter(_nodes_of(block.inputs, live))
    for node in block.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(entering)
        elif node.op == "output":
            (leaving,) = node.args
            for value, made in zip(block.outputs, leaving, strict=True):
                live[value.name] = copies[made]
        elif node.name in live:
            copies[node] = live[node.name]
        else:
            copy = copies[node] = live[node.name] = graph.node_copy(node, copies.__getitem__)
            if node.op in ("call_module", "get_attr"):
                copy.target = f"{path}.{block.submodule_path(node.target)}"


def _nodes_of(values: Sequence[LiveTensor], live: dict[str, fx.Node]) -> list[fx.Node]:
    return [live[value.name] for value in values]
