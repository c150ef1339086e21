"""From a user's module with branches to a chain of layers, which profiles, plans, cuts and checkpoints are made of.

The operations that `module_tracing` finds stay in the order of the program, and each layer of the chain begins where
one that has parameters, or is a module, needs its input: of the boundaries between two of these the narrowest is
kept, as the operations between have no parameters and take next to no time. Where a boundary cannot be cut, layers
are merged: see `_Line`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor, fx, nn

from heterps_core.errors import ConfigurationError
from heterps_core.models.graph_block import GraphBlock, LiveTensor
from heterps_core.models.module_tracing import Probe, traced
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.models.values_made_again import ROW_COUNTS, make_where_used, width_of

_COMPUTES = ("call_function", "call_method", "call_module")


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
        embeddings = [each for node in graph.nodes if (each := self._embedding(node)) is not None]
        # Columns of other layers beside an output of any width could not be found again.
        self._packs_sequences = len(embeddings) == 1 and embeddings[0].packs_sequences
        for each in embeddings:
            each.packs_sequences = self._packs_sequences
        module.eval()
        probes = [Probe(model, module, graph, num_rows=num_rows) for num_rows in ROW_COUNTS]
        for probe in probes:
            probe.run(None)
        module.train()
        self._found = [probe.found for probe in probes]
        self._originals = make_where_used(graph, probes)
        self._nodes = _in_line(graph)
        self._output: fx.Node = next(node for node in graph.nodes if node.op == "output")
        position_of = {node: position for position, node in enumerate(self._nodes)}
        self._last_use = {
            node: max((self._position_of_use(user, position_of) for user in node.users), default=-1)
            for node in self._nodes
        }
        self._made: set[fx.Node] = set()
        self._unsaved = set(module.state_dict())
        self._whole_spans = [
            *self._spans_of_writes(probes[0], position_of),
            *self._spans_of_parameters(probes[0]),
        ]

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
        graph, nodes = fx.Graph(), self._nodes[first:stop]
        copies = {node: graph.placeholder(node.name) for node in inputs}
        for node in nodes:
            for needed in node.all_input_nodes:
                if needed.op == "get_attr" and needed not in copies:
                    copies[needed] = graph.node_copy(needed)
            # Copies of one operation bear its name: a stage runs the first of them.
            original = self._originals.get(node, node)
            if original not in copies:
                args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
                copies[original] = graph.create_node(node.op, node.target, args, kwargs, original.name)
                assert copies[original].name == original.name
            copies[node] = copies[original]
        graph.output(tuple(copies[node] for node in outputs))
        again = [self._originals[node] for node in nodes if self._is_made_again(node)]
        self._made |= {self._originals.get(node, node) for node in nodes}
        block = GraphBlock(
            self._module,
            graph,
            inputs=self._described(inputs),
            outputs=self._described(outputs),
            made_again=self._described([*dict.fromkeys(again)]),
        )
        held = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
        block.leave_out(held - self._unsaved)
        self._unsaved -= held
        return block

    def _is_made_again(self, node: fx.Node) -> bool:
        """Tell whether a part uses a value without gradient that an earlier one made already."""
        value = self._found[0][node]
        return (
            self._originals.get(node) in self._made
            and any(self._originals.get(user, user) not in self._made for user in node.users)
            and isinstance(value, Tensor)
            and value.shape[:1] == ROW_COUNTS[:1]
            and not value.requires_grad
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
        live = self._live(position)
        if self._packs_sequences and len(live) > 1 and any(self._embedding(node) for node in live):
            return "sequences of any length cross alone"
        for node in live:
            if math.isinf(width_of([found[node] for found in self._found])):
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
        """Tell whether an operation is a module or multiplies by parameters; a bias or a norm of a row is neither."""
        if node.op == "call_module":
            return not isinstance(self._module.get_submodule(str(node.target)), nn.LayerNorm | nn.RMSNorm)
        return node not in self._originals and any(
            needed.op == "get_attr" and _needed_value(self._module, str(needed.target)).ndim > 1
            for needed in node.all_input_nodes
        )

    def _spans_of_writes(
        self, probe: Probe, position_of: dict[fx.Node, int]
    ) -> Iterator[tuple[int, int, str]]:
        for writer, changed in probe.written.items():
            # A buffer that is packed after the writer holds what it wrote.
            places = [position_of[node] for node in [writer, *changed] if node in position_of]
            yield min(places), max(places), f"{writer.name} writes in place to {changed[0].name}"

    def _spans_of_parameters(self, probe: Probe) -> Iterator[tuple[int, int, str]]:
        written = {id(probe.found[node]) for nodes in probe.written.values() for node in nodes}
        uses: dict[int, list[tuple[int, str]]] = {}
        changing: set[int] = set()
        for position, node in enumerate(self._nodes):
            held: dict[str, Tensor] = {}
            if node.op == "call_module" and self._embedding(node) is None:
                module = self._module.get_submodule(str(node.target))
                held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
                held = {f"{node.target}.{name}": value for name, value in held.items()}
                changing |= {id(value) for value in held.values()}
            for needed in node.all_input_nodes:
                if needed.op == "get_attr":
                    value = held[str(needed.target)] = _needed_value(self._module, str(needed.target))
                    if isinstance(value, nn.Parameter) or id(value) in written:
                        changing.add(id(value))
            for name, value in held.items():
                uses.setdefault(id(value), []).append((position, name))
        # A constant that operations read is in each part that needs it.
        for key, places in uses.items():
            (first, name), (last, _) = places[0], places[-1]
            if first < last and key in changing:
                yield first, last, f"{name} is used on both sides"


def _needed_value(module: nn.Module, path: str) -> Tensor:
    """Return a parameter, buffer or constant of a module."""
    holder, _, name = path.rpartition(".")
    value = getattr(module.get_submodule(holder), name)
    assert isinstance(value, Tensor)
    return value


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
