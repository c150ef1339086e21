"""From a graph of operations to a chain: cut wherever a single tensor crosses, and keep the rest together.

A set of nodes that holds all predecessors of its members can be trained before the others. If all edges that leave it
start at one node, one tensor crosses, and the planner may cut there. Taking as many such sets as fit into one another
gives the chain with the most layers; what lies between two of them, side branches included, is one layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from heterps_core.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Nodes that make one layer of the chain."""

    nodes: tuple[str, ...]
    """In an order in which they can run."""

    leaving: str
    """The node whose tensor the next block reads; of the last block the output."""


def cut_into_blocks(nodes: Sequence[str], edges: Iterable[tuple[str, str]]) -> list[Block]:
    """Return the longest chain of blocks of a directed graph.

    The output is the node without successors that has the most predecessors. A branch that ends elsewhere, such as an
    auxiliary classifier or a state that nobody reads, belongs to the block in which it starts.

    Args:
        nodes: All nodes, at least one.
        edges: (from, to), both in `nodes`.

    Raises:
        ConfigurationError: The graph has a cycle, or falls into parts that no edge joins.
    """
    predecessors: dict[str, set[str]] = {node: set() for node in nodes}
    for before, after in edges:
        predecessors[after].add(before)
    _check_joined(predecessors)
    order = _running_order(predecessors)
    up_to = _with_ancestors(order, predecessors)
    has_successor = set().union(*predecessors.values())
    output = max(
        (node for node in order if node not in has_successor), key=lambda node: up_to[node].bit_count()
    )
    bit_of = {node: 1 << index for index, node in enumerate(order)}
    leads_to_output = [node for node in order if up_to[output] & bit_of[node]]
    cuts = _longest_nesting(_cut_nodes(leads_to_output, predecessors, up_to, bit_of), up_to, bit_of)
    block_of = {
        node: next(index for index, cut in enumerate(cuts) if up_to[cut] & bit_of[node])
        for node in leads_to_output
    }
    for node in order:
        if node not in block_of:
            block_of[node] = max((block_of[before] for before in predecessors[node]), default=0)
    return [
        Block(nodes=tuple(node for node in order if block_of[node] == index), leaving=cut)
        for index, cut in enumerate(cuts)
    ]


def _check_joined(predecessors: dict[str, set[str]]) -> None:
    neighbours: dict[str, set[str]] = {node: set(before) for node, before in predecessors.items()}
    for node, before in predecessors.items():
        for other in before:
            neighbours[other].add(node)
    first = next(iter(neighbours))
    reached, waiting = {first}, [first]
    while waiting:
        new = neighbours[waiting.pop()] - reached
        reached |= new
        waiting.extend(new)
    apart = [node for node in neighbours if node not in reached]
    if apart:
        raise ConfigurationError(
            f"all nodes must be joined by edges, but no edge joins {apart[0]} and {len(apart) - 1} others "
            f"to {first}; is the graph cut off?"
        )


def _running_order(predecessors: dict[str, set[str]]) -> list[str]:
    try:
        return list(TopologicalSorter(predecessors).static_order())
    except CycleError as error:
        raise ConfigurationError(
            f"the graph must have no cycle, but has: {' -> '.join(error.args[1])}"
        ) from error


def _with_ancestors(order: Sequence[str], predecessors: dict[str, set[str]]) -> dict[str, int]:
    """Return for each node the set of itself and all that it depends on, as bits in the running order."""
    up_to: dict[str, int] = {}
    for index, node in enumerate(order):
        up_to[node] = 1 << index
        for before in predecessors[node]:
            up_to[node] |= up_to[before]
    return up_to


def _cut_nodes(
    nodes: Sequence[str], predecessors: dict[str, set[str]], up_to: dict[str, int], bit_of: dict[str, int]
) -> list[str]:
    """Return the nodes behind which one tensor crosses.

    What the ancestors of a node feed must be among them, or be the node itself.
    """
    fed_by: dict[str, int] = dict.fromkeys(nodes, 0)
    for node in nodes:
        for before in predecessors[node]:
            fed_by[before] |= bit_of[node]
    fed_by_ancestors: dict[str, int] = {}
    for node in nodes:
        fed_by_ancestors[node] = 0
        for before in predecessors[node]:
            fed_by_ancestors[node] |= fed_by_ancestors[before] | fed_by[before]
    return [node for node in nodes if not fed_by_ancestors[node] & ~up_to[node]]


def _longest_nesting(cut_nodes: Sequence[str], up_to: dict[str, int], bit_of: dict[str, int]) -> list[str]:
    """Return the longest list of cuts of which each lies behind the one before; the output is the last.

    Inputs that meet later, such as two towers, can both be cut, but not at once.
    """
    longest: dict[str, list[str]] = {}
    for node in cut_nodes:
        before = [longest[other] for other in longest if up_to[node] & bit_of[other]]
        longest[node] = [*max(before, key=len, default=[]), node]
    return longest[cut_nodes[-1]]
