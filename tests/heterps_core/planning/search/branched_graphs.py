"""Random models with branches, the line of their operations, and the cheapest of all their convex partitions.

Any plan of convex stages is one of some topological order of the operations, cut into pieces; so the best over all
orders is the best over all convex partitions. Between two stages crosses what is made before and used behind, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.optimum import find_optimum
from tests.builders import make_problem
from tests.independent_planner import CandidateStages

NUM_OPERATIONS = 6
MOST_UNITS = 48
"""Of a device type: more than these plans take, and few enough to try all counts."""

Graph = dict[int, frozenset[int]]
"""Of each operation those whose results it takes; the first takes the batch."""


def draw_graph(seed: int) -> Graph:
    """Return a graph in which each operation takes one result or two of those before it, all but the last used."""
    random = np.random.default_rng(seed)
    needs = {0: set[int]()}
    for operation in range(1, NUM_OPERATIONS):
        count = min(operation, int(random.integers(1, 3)))
        needs[operation] = {int(each) for each in random.choice(operation, size=count, replace=False)}
    for operation in range(NUM_OPERATIONS - 1):
        if not any(operation in taken for taken in needs.values()):
            needs[NUM_OPERATIONS - 1].add(operation)
    return {operation: frozenset(taken) for operation, taken in needs.items()}


def orders_of(graph: Graph, before: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield all topological orders; that of the program comes first."""
    if len(before) == len(graph):
        yield before
    for operation, taken in graph.items():
        if operation not in before and taken <= set(before):
            yield from orders_of(graph, (*before, operation))


def in_order(problem: SchedulingProblem, graph: Graph, order: tuple[int, ...]) -> SchedulingProblem:
    """Return the line of operations in some order, whose boundaries carry all that is live there."""
    layers = []
    for place, operation in enumerate(order):
        after = order[place + 1 :]
        live = [each for each in order[: place + 1] if any(each in graph[user] for user in after)]
        crossing = sum(problem.layers[each].output_bytes_per_sample for each in live)
        layers.append(replace(problem.layers[operation], output_bytes_per_sample=crossing))
    return replace(problem, layers=tuple(layers))


def draw_problem(seed: int) -> SchedulingProblem:
    """Return costs of the operations of a graph on three device types."""
    problem = make_problem(seed, num_layers=NUM_OPERATIONS, num_types=3, floor_samples_per_s=5_000)
    units = {name: replace(unit, max_units=MOST_UNITS) for name, unit in problem.device_types.items()}
    return replace(problem, device_types=units)


def cheapest_partition_usd(problem: SchedulingProblem, graph: Graph) -> float:
    """Return the cost of the cheapest convex partition, by trying them all with formulas of their own."""
    lines = (in_order(problem, graph, order) for order in orders_of(graph))
    return min(CandidateStages.of(line).brute_force_usd() for line in lines)


def losses_of_lines(seeds: range) -> list[float]:
    """Return by what share the plan of each graph's line costs more than its cheapest convex partition."""
    losses = []
    for seed in seeds:
        graph, problem = draw_graph(seed), draw_problem(seed)
        line = find_optimum(in_order(problem, graph, tuple(graph)))
        losses.append(line.cost_usd / cheapest_partition_usd(problem, graph) - 1)
    return losses
