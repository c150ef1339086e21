"""From a user's module with branches to a chain of layers, which profiles, plans, cuts and checkpoints are made of.

The operations that `module_tracing` finds stay in the order of the program, and each layer of the chain begins where
one that has parameters, or is a module, needs its input: of the boundaries between two of these the narrowest is
kept, as the operations between have no parameters and take next to no time. Where a boundary cannot be cut, layers
are merged: see `_Line`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, fx, nn

from heterps_core.errors import ConfigurationError
from heterps_core.models.graph_block import GraphBlock, LiveTensor
from heterps_core.models.module_tracing import Probe, traced
from heterps_core.models.slot_embedding import SlotEmbedding

_COMPUTES = ("call_function", "call_method", "call_module")

_ROW_COUNTS = (2, 3)
"""Synthetic rows of two runs: a size that follows them is the number of rows."""


def chain_of(model: str, module: nn.Module) -> nn.Sequential:
    """Return a module whose forward takes the batch as a chain of layers with the same parameters.

    Embeddings are layers of their own, after which the tensors that were live before them stand first. All other
    layers are of type `GraphBlock`.

    Args:
        model: Its name, for messages.
        module: Left in training mode; its parameters are those of the chain.

    Raises:
        ConfigurationError: The module cannot be traced or cut: its forward takes more than the batch, reads the
            batch beside embeddings, depends on values or on the mode, or an operation that is not to be cut spans
            an embedding.
    """
    return _Line(model, module, traced(model, module)).chain()


class _Line:
    """The operations of a model one after the other, and the boundaries between them.

    Boundary p lies after operation p. It can be cut where each live tensor has float32 values and a row for each of
    the batch, no parameter is used on both sides, and no later operation writes to a tensor from before.
    """

    def __init__(self, model: str, module: nn.Module, graph: fx.Graph) -> None:
        self._model, self._module = model, module
        module.eval()
        probes = [Probe(model, module, graph, num_rows=num_rows) for num_rows in _ROW_COUNTS]
        for probe in probes:
            probe.run(None)
        module.train()
        self._found = [probe.found for probe in probes]
        _move_views_to_users(graph, probes)
        self._nodes = _in_line(graph)
        self._output: fx.Node = next(node for node in graph.nodes if node.op == "output")
        position_of = {node: position for position, node in enumerate(self._nodes)}
        self._last_use = {
            node: max((self._position_of_use(user, position_of) for user in node.users), default=-1)
            for node in self._nodes
        }
        self._whole_spans = [*self._spans_of_writes(probes[0], position_of), *self._spans_of_parameters()]

    def chain(self) -> nn.Sequential:
        """Return the layers."""
        layers: dict[str, nn.Module] = {}
        first = 0
        for stop in [*(position + 1 for position in self._cuts()), len(self._nodes)]:
            layer = self._layer(first, stop)
            heavy = next(
                (node for node in self._nodes[first:stop] if self._is_heavy(node)), self._nodes[first]
            )
            name = str(heavy.target if heavy.op == "call_module" else heavy.name).replace(".", "_")
            layers[name if name not in layers else f"{name}_{heavy.name}"] = layer
            first = stop
        return nn.Sequential(OrderedDict(layers))

    def _layer(self, first: int, stop: int) -> nn.Module:
        inputs, outputs = self._live(first - 1), self._live(stop - 1)
        embedding = self._embedding(self._nodes[first])
        if embedding is not None:
            return embedding.in_chain(self._described(inputs), self._described(outputs))
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in inputs}
        for node in self._nodes[first:stop]:
            for needed in node.all_input_nodes:
                if needed.op == "get_attr" and needed not in copies:
                    copies[needed] = graph.node_copy(needed)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in outputs))
        return GraphBlock(
            self._module, graph, inputs=self._described(inputs), outputs=self._described(outputs)
        )

    def _cuts(self) -> Iterator[int]:
        """Yield the boundaries that are kept, in order."""
        heavy = [position for position, node in enumerate(self._nodes) if self._is_heavy(node)]
        end = len(self._nodes)
        for here, following in pairwise([*heavy, end]):
            beside_embeddings = {
                boundary: self._nodes[position].target
                for position, boundary in ((here, here), (following, following - 1))
                if position < end and boundary < end - 1 and self._embedding(self._nodes[position])
            }
            for boundary, embedding in sorted(beside_embeddings.items()):
                problem = self._problem_at(boundary)
                if problem:
                    raise ConfigurationError(
                        f"the model {self._model!r} must be cut at its embedding {embedding}, but {problem}; look "
                        f"rows up in all embeddings before anything else"
                    )
                yield boundary
            if not beside_embeddings and following < end:
                widths = {
                    boundary: sum(value.width for value in self._described(self._live(boundary)))
                    for boundary in range(here, following)
                    if not self._problem_at(boundary)
                }
                if widths:
                    # The last of the narrowest: a layer keeps its activation function.
                    yield min(widths, key=lambda boundary: (widths[boundary], -boundary))

    def _problem_at(self, position: int) -> str:
        """Return why a boundary cannot be cut; empty where it can."""
        for first, last, what in self._whole_spans:
            if first <= position < last:
                return what
        for node in self._live(position):
            values = [found[node] for found in self._found]
            tensors = [value for value in values if isinstance(value, Tensor)]
            if (
                len(tensors) < len(values)
                or any(tensor.dtype is not torch.float32 for tensor in tensors)
                or [tensor.shape[:1] for tensor in tensors] != [(num_rows,) for num_rows in _ROW_COUNTS]
                or tensors[0].shape[1:] != tensors[1].shape[1:]
            ):
                return f"{node.name} is no float32 tensor with a row for each row of the batch"
        return ""

    def _live(self, position: int) -> list[fx.Node]:
        """Return the operations up to a boundary whose results are used after it, in order."""
        return [node for node in self._nodes[: position + 1] if self._last_use[node] > position]

    def _described(self, nodes: list[fx.Node]) -> tuple[LiveTensor, ...]:
        described = []
        for node in nodes:
            value = self._found[0][node]
            assert isinstance(value, Tensor)
            described.append(LiveTensor(node.name, tuple(value.shape[1:])))
        return tuple(described)

    def _position_of_use(self, user: fx.Node, position_of: dict[fx.Node, int]) -> int:
        return len(self._nodes) if user is self._output else position_of[user]

    def _embedding(self, node: fx.Node) -> SlotEmbedding | None:
        if node.op != "call_module":
            return None
        module = self._module.get_submodule(str(node.target))
        return module if isinstance(module, SlotEmbedding) else None

    def _is_heavy(self, node: fx.Node) -> bool:
        """Tell whether an operation is a module or multiplies by parameters; to add a bias is neither."""
        return node.op == "call_module" or any(
            needed.op == "get_attr" and _needed_value(self._module, str(needed.target)).ndim > 1
            for needed in node.all_input_nodes
        )

    def _spans_of_writes(
        self, probe: Probe, position_of: dict[fx.Node, int]
    ) -> Iterator[tuple[int, int, str]]:
        for writer, changed in probe.written.items():
            # A buffer that is packed after the writer holds what it wrote.
            places = [position_of[node] for node in [writer, *changed]]
            yield min(places), max(places), f"{writer.name} writes in place to {changed[0].name}"

    def _spans_of_parameters(self) -> Iterator[tuple[int, int, str]]:
        uses: dict[int, list[tuple[int, str]]] = {}
        for position, node in enumerate(self._nodes):
            held: dict[str, Tensor] = {}
            if node.op == "call_module" and self._embedding(node) is None:
                module = self._module.get_submodule(str(node.target))
                held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
                held = {f"{node.target}.{name}": value for name, value in held.items()}
            for needed in node.all_input_nodes:
                if needed.op == "get_attr":
                    held[str(needed.target)] = _needed_value(self._module, str(needed.target))
            for name, value in held.items():
                uses.setdefault(id(value), []).append((position, name))
        for places in uses.values():
            (first, name), (last, _) = places[0], places[-1]
            if first < last:
                yield first, last, f"{name} is used on both sides"


def _needed_value(module: nn.Module, path: str) -> Tensor:
    """Return a parameter, buffer or constant of a module."""
    holder, _, name = path.rpartition(".")
    value = getattr(module.get_submodule(holder), name)
    assert isinstance(value, Tensor)
    return value


def _move_views_to_users(graph: fx.Graph, probes: Sequence[Probe]) -> None:
    """Make views of a tensor where they are used, while that tensor is needed there or later anyway.

    It then travels once. Operations whose results are not used are left out.
    """
    found = probes[0].found
    written = {node for nodes in probes[0].written.values() for node in nodes}
    order: dict[fx.Node, int] = {node: place for place, node in enumerate(graph.nodes)}
    views: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if _is_view(node, found) and node not in written:
            (viewed,) = node.all_input_nodes
            views[node] = [*views.get(viewed, []), node]
    for node, chain in views.items():
        (root,) = chain[0].all_input_nodes
        needed_until = max((order.get(user, -1) for user in root.users if user not in chain), default=-1)
        for user in [user for user in node.users if user not in views and order[user] <= needed_until]:
            made: dict[fx.Node, fx.Node] = {root: root}
            with graph.inserting_before(user):
                for view in chain:
                    made[view] = graph.node_copy(view, made.__getitem__)
                    for probe in probes:
                        probe.found[made[view]] = probe.found[view]
            user.replace_input_with(node, made[node])
    for node in reversed(list(graph.nodes)):
        if node.op in _COMPUTES and not node.users and node not in probes[0].written:
            graph.erase_node(node)


def _is_view(node: fx.Node, found: Mapping[fx.Node, object]) -> bool:
    if node.op not in ("call_function", "call_method") or len(node.all_input_nodes) != 1:
        return False
    made, viewed = found[node], found[node.all_input_nodes[0]]
    return (
        isinstance(made, Tensor)
        and isinstance(viewed, Tensor)
        and node.all_input_nodes[0].op != "get_attr"
        and made.untyped_storage().data_ptr() == viewed.untyped_storage().data_ptr()
    )


def _in_line(graph: fx.Graph) -> list[fx.Node]:
    """Return the operations in the order of the program; what needs no batch as late as it can come."""
    follows_batch: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(needed in follows_batch for needed in node.all_input_nodes):
            follows_batch.add(node)
    line: dict[fx.Node, None] = {}

    def add(node: fx.Node) -> None:
        for needed in node.all_input_nodes:
            if needed not in follows_batch and needed not in line:
                add(needed)
        if node.op in _COMPUTES:
            line[node] = None

    for node in graph.nodes:
        if node in follows_batch:
            add(node)
    return list(line)
