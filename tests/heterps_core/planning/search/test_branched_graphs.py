"""A model with branches is planned as a line of its operations in the order of the program.

Any plan of convex stages is one of some topological order of the operations, cut into pieces; so the best over all
orders is the best over all convex partitions. Between two stages crosses what is made before and used behind, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.optimum import find_optimum
from tests.builders import make_problem

NUM_OPERATIONS = 6
MOST_WORSE, MOST_LOSS = 11, 0.40
"""Of 200 graphs whose tensors are drawn from 0.5 to 64 KB a row: the line is cheapest for 189, and costs up to 39.3 %
more for one that sends a large tensor past operations that could have come first. Seen on 2026-11-23."""

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
    if len(before) == len(graph):
        yield before
    for operation, taken in graph.items():
        if operation not in before and taken <= set(before):
            yield from orders_of(graph, (*before, operation))


def in_order(problem: SchedulingProblem, graph: Graph, order: tuple[int, ...]) -> SchedulingProblem:
    """Return the line of operations in some order, whose boundaries carry all that is live there."""
    layers = []
    for place, operation in enumerate(order):
        behind = order[place + 1 :]
        live = [each for each in order[: place + 1] if any(each in graph[user] for user in behind)]
        crossing = sum(problem.layers[each].output_bytes_per_sample for each in live)
        layers.append(replace(problem.layers[operation], output_bytes_per_sample=crossing))
    return replace(problem, layers=tuple(layers))


def losses_of(seeds: range) -> list[float]:
    """Return by what share the plan of the program's order costs more than the best of all orders."""
    losses = []
    for seed in seeds:
        graph = draw_graph(seed)
        problem = make_problem(seed, num_layers=NUM_OPERATIONS, num_types=3, floor_samples_per_s=5_000)
        costs = {order: find_optimum(in_order(problem, graph, order)).cost_usd for order in orders_of(graph)}
        losses.append(costs[tuple(range(NUM_OPERATIONS))] / min(costs.values()) - 1)
    return losses


def test_what_is_made_before_a_boundary_and_used_twice_behind_it_crosses_once():
    problem = make_problem(0, num_layers=NUM_OPERATIONS, num_types=2)
    # 0 feeds 1, 2 and 5; all else is a chain beside it.
    graph = {0: frozenset[int](), **{number: frozenset({number - 1}) for number in range(1, 6)}}
    graph |= {2: frozenset({0, 1}), 5: frozenset({0, 4})}

    line = in_order(problem, graph, tuple(range(NUM_OPERATIONS)))

    made = [layer.output_bytes_per_sample for layer in problem.layers]
    crossing = [layer.output_bytes_per_sample for layer in line.layers]
    assert crossing == [made[0], *(made[0] + made[number] for number in range(1, 5)), 0]


@pytest.mark.slow
def test_of_200_random_graphs_the_programs_order_is_the_best_of_all_orders_for_nearly_all():
    losses = losses_of(range(200))

    print(f"{sum(loss > 1e-9 for loss in losses)} of 200 cost more, at most {max(losses):.1%}")
    assert sum(loss > 1e-9 for loss in losses) <= MOST_WORSE
    assert max(losses) <= MOST_LOSS
