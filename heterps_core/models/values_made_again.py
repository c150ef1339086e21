"""Values of a traced model that are made again where they are used, in place of travelling through layers between.

They are views, and values without gradients that cost little: masks, positions, lengths, sizes, types and devices.
Each use gets a copy of the operations that lead to its value; a block or a stage runs the first of equal copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument

from heterps_core.models.module_tracing import Probe

ROW_COUNTS = (2, 3)
"""Synthetic rows of two runs: a size that follows them is the number of rows."""

_MADE_FOR_ONE_SENT = 4
"""Most values to make for each that need not travel. To send one and its gradient takes 17 ns, at 10 Gbit/s 6 of them
on the wire, to pack it 8 and to pass it through a socket 3; an operation makes one in 0.2 (bool) to 3.3 ns (float32;
2 x86 cores, processor time, 2026-11-29)."""


def make_where_used(graph: fx.Graph, probes: Sequence[Probe]) -> dict[fx.Node, fx.Node]:
    """Move operations to the uses of their values where less travels then; return the original of each copy.

    Operations without a use of their results are left out.

    Args:
        probes: Of `ROW_COUNTS` rows; what copies return is noted in them.
    """
    return _Uses(graph, probes).moved()


def width_of(values: Sequence[object]) -> float:
    """Return the numbers of a row in what an operation made of `ROW_COUNTS` rows; infinite if it cannot travel.

    To travel it must be a float32 tensor with a row for each row of the batch.
    """
    shapes = [value.shape for value in values if isinstance(value, Tensor) and value.dtype is torch.float32]
    has_rows = [shape[:1] for shape in shapes] == [(num_rows,) for num_rows in ROW_COUNTS]
    return math.prod(shapes[0][1:]) if has_rows and shapes[0][1:] == shapes[1][1:] else math.inf


class _Uses:
    """Where the values of a graph are used, by the places of operations in the order of the program."""

    def __init__(self, graph: fx.Graph, probes: Sequence[Probe]) -> None:
        self._graph, self._probes = graph, probes
        self._written = set(probes[0].written).union(*probes[0].written.values())
        self._place = {node: place for place, node in enumerate(graph.nodes)}
        self._makeable = {node for node in graph.nodes if self._is_makeable(node)}
        # A makeable value is used nowhere until it turns out that it had better travel.
        self._last_use = {
            node: max((self._place[user] for user in node.users if node not in self._makeable), default=-1)
            for node in graph.nodes
        }
        self._originals: dict[fx.Node, fx.Node] = {}

    def moved(self) -> dict[fx.Node, fx.Node]:
        """Move all operations, those that are used last first; return the original of each copy."""
        for user in reversed(list(self._graph.nodes)):
            if user not in self._makeable or self._last_use[user] >= 0:
                for node in user.all_input_nodes:
                    if node in self._makeable:
                        self._move(node, user)
        for node in reversed(list(self._graph.nodes)):
            if node.op.startswith("call_") and not node.users and node not in self._probes[0].written:
                self._graph.erase_node(node)
        return self._originals

    def _values(self, node: fx.Node) -> list[object]:
        return [probe.found[node] for probe in self._probes]

    def _width(self, node: fx.Node) -> float:
        return width_of(self._values(node))

    def _is_makeable(self, node: fx.Node) -> bool:
        if node.op not in ("call_function", "call_method") or node in self._written:
            return False
        made, inputs = self._values(node)[0], node.all_input_nodes
        if not isinstance(made, Tensor):
            return self._is_of_any_tensor(node)
        return self._is_view(node) or (
            node in self._probes[0].plain
            and not made.requires_grad
            and not any(
                each in self._written or isinstance(self._values(each)[0], nn.Parameter) for each in inputs
            )
        )

    def _is_of_any_tensor(self, node: fx.Node) -> bool:
        """Tell whether a value is a size, type or device that any tensor of the batch shows, or always the same."""
        first, second = self._values(node)
        is_known = isinstance(first, int | torch.dtype | torch.device) and not isinstance(first, bool)
        return is_known and (first == second or (first, second) == ROW_COUNTS)

    def _is_view(self, node: fx.Node) -> bool:
        values = [self._values(each)[0] for each in (node, *node.all_input_nodes)]
        storages = [value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor)]
        is_of_one = len(values) == len(storages) == 2 and storages[0] == storages[1]
        return is_of_one and node.all_input_nodes[0].op != "get_attr"

    def _sent(self, nodes: Iterable[fx.Node], place: int) -> float:
        """Return the numbers of a row that travel to a place for some operations alone."""
        return sum(self._width(node) for node in nodes if self._last_use[node] < place)

    def _inputs(self, node: fx.Node) -> list[fx.Node]:
        return node.all_input_nodes if isinstance(self._values(node)[0], Tensor) else []

    def _sources(
        self, node: fx.Node, place: int, known: dict[fx.Node, dict[fx.Node, None]]
    ) -> dict[fx.Node, None]:
        """Return the values that must be at a place for a value: itself, or those that it is made of there."""
        if node.op == "get_attr":
            return {}
        if node not in self._makeable or self._last_use[node] >= place:
            return {node: None}
        if node not in known:
            found: dict[fx.Node, None] = {}
            for needed in self._inputs(node):
                found |= self._sources(needed, place, known)
            known[node] = {node: None} if self._sent(found, place) >= self._width(node) else found
        return known[node]

    def _chain(self, node: fx.Node, sources: Iterable[fx.Node], chain: dict[fx.Node, None]) -> None:
        """Add the operations that lead from sources to a value."""
        if node.op != "get_attr" and node not in sources and node not in chain:
            for needed in self._inputs(node):
                self._chain(needed, sources, chain)
            chain[node] = None

    def _move(self, node: fx.Node, user: fx.Node) -> None:
        """Make a value where it is used if that is cheaper, and else let it travel there."""
        place, chain = self._place[user], dict[fx.Node, None]()
        sources = self._sources(node, place, {})
        self._chain(node, sources, chain)
        # Not a number where neither can travel, and then not larger.
        spared = self._width(node) - self._sent(sources, place)
        if sum(self._work(each) for each in chain) > _MADE_FOR_ONE_SENT * spared:
            sources, chain = {node: None}, {}
        for source in sources:
            self._last_use[source] = max(self._last_use[source], place)
        made: dict[fx.Node, Argument] = {}
        with self._graph.inserting_before(user):
            for each in chain:
                made[each] = self._copy(each, place, made)
        user.args, user.kwargs = fx.map_arg(
            (user.args, user.kwargs), lambda used: made.get(used, used) if used is node else used
        )

    def _work(self, node: fx.Node) -> float:
        made = self._values(node)[0]
        return made.numel() / ROW_COUNTS[0] if isinstance(made, Tensor) and not self._is_view(node) else 0

    def _copy(self, node: fx.Node, place: int, made: dict[fx.Node, Argument]) -> Argument:
        """Add an operation on copies of its inputs, or ask a tensor that is there for a size, type or device."""
        values = self._values(node)
        if isinstance(values[0], Tensor):
            copy = self._graph.node_copy(node, lambda each: made.get(each, each))
            self._originals[copy] = node
        else:
            is_there = (each for each in self._place if self._place[each] < place <= self._last_use[each])
            beside = next((each for each in is_there if self._width(each) < math.inf), None)
            is_kept = isinstance(values[0], torch.device) or values[0] is torch.float32
            if beside is None or (values[0] == values[1] and not is_kept):
                return node if beside is None else values[0]  # type: ignore[return-value]
            copy = self._graph.call_method("size", (beside, 0))
            if is_kept:
                name = "device" if isinstance(values[0], torch.device) else "dtype"
                copy = self._graph.call_function(getattr, (beside, name))
        for probe, value in zip(self._probes, values, strict=True):
            probe.found[copy] = value
        return copy
