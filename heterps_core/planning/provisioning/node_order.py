"""The order of a launched cluster's nodes, by where they turned out to stand in the network.

Replicas are numbered over the nodes of a stage in the cluster's order, and those of adjacent stages that work on the
same rows exchange activations: so the order decides how many switches these cross.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from heterps_core.cluster import Cluster
from heterps_core.hardware import Market
from heterps_core.models.model_graph import ModelGraph
from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.planning.simulate.row_routes import routes_between
from heterps_core.plans.scheduling_plan import Stage, check_stages_cover_chain
from heterps_core.training.pipeline.stage_exchange import replica_slice

NUM_BEGINNINGS = 64
"""Orders, all but the launch's drawn, from which nodes change places: single swaps alone end in a poor order."""

_LEAST_GAIN = 1e-9
"""Relative; smaller gains are rounding."""


def near_order(cluster: Cluster, network_paths: Mapping[str, Sequence[str]], traffic: Floats) -> Cluster:
    """Return a cluster whose nodes that exchange most are near one another, with the rendezvous in their middle.

    Nodes of a stage with equally many workers change places, so that the sum over all pairs of bytes times hops is
    small. The rendezvous host is an on-demand node where there is one, of these the one with the fewest hops to all.

    Paths are the nodes of the network above each machine by node id, from the top down: machines that share more of
    them are nearer, and one that is missing is far from all. `traffic` is that of `plan_traffic` for the plan.
    """
    nodes = cluster.nodes
    hops = network_hops([network_paths.get(node.node_id, ()) for node in nodes])
    runs = np.zeros((len(nodes), len(traffic)))
    for index, node in enumerate(nodes):
        first_rank = sum(other.num_workers for other in nodes if other.stage < node.stage)
        runs[index, first_rank + np.array(cluster.replicas_of(node))] = 1.0
    between = runs @ traffic @ runs.T
    np.fill_diagonal(between, 0.0)
    kinds = np.array([(node.stage, node.num_workers) for node in nodes])
    places = _best_places(between, hops, (kinds[:, None] == kinds).all(axis=-1))
    on_demand = [index for index, node in enumerate(nodes) if node.market is Market.ON_DEMAND]
    host = nodes[min(on_demand or range(len(nodes)), key=lambda index: hops[index].sum())]
    port = cluster.rendezvous.rpartition(":")[2]
    return replace(
        cluster, nodes=tuple(nodes[place] for place in places), rendezvous=f"{host.address}:{port}"
    )


def network_hops(network_paths: Sequence[Sequence[str]]) -> Floats:
    """Return how many levels up the network the way between two machines turns; shape (machines, machines).

    Example:
        >>> network_hops([("a", "b", "c"), ("a", "b", "c"), ("a", "b", "d"), ()]).tolist()
        [[0.0, 1.0, 2.0, 4.0], [1.0, 0.0, 2.0, 4.0], [2.0, 2.0, 0.0, 4.0], [4.0, 4.0, 4.0, 0.0]]
    """
    depth = max(map(len, network_paths), default=0)
    ids = np.array([[*path, *[""] * (depth - len(path))] for path in network_paths]).reshape(-1, depth)
    shared = np.cumprod((ids[:, None] == ids) & (ids != ""), axis=-1).sum(axis=-1)
    hops: Floats = (depth + 1 - shared).astype(float)
    np.fill_diagonal(hops, 0.0)
    return hops


def plan_traffic(
    graph: ModelGraph, stages: Sequence[Stage], *, batch_size: int, num_microbatches: int
) -> Floats:
    """Return the bytes of a training step from rank (row) to rank (column), by stages, then replicas.

    Between adjacent stages the rows where the slices overlap, as activations forward and gradients back. Inside
    a stage a ring for the dense gradients, 2 (k - 1) / k of their bytes from each replica to the next; and between
    any two replicas the rows of embeddings that one looks up and the other owns, with their gradients. Ignored:
    row indices, and that a row which occurs twice in a batch travels once.

    Raises:
        ConfigurationError: The stages do not cover the chain.
    """
    check_stages_cover_chain(stages, len(graph.layers))
    firsts = np.cumsum([0, *(stage.num_replicas for stage in stages)])
    ranks = [slice(first, stop) for first, stop in pairwise(firsts)]
    traffic = np.zeros((firsts[-1], firsts[-1]))
    for stage, own in zip(stages, ranks, strict=True):
        k = stage.num_replicas
        layers = graph.layers[stage.first_layer : stage.last_layer + 1]
        looked_up_bytes = sum(layer.looked_up_bytes_per_sample for layer in layers if layer.is_sharded)
        dense_bytes = sum(layer.parameter_bytes for layer in layers if not layer.is_sharded)
        # Of the rows that one replica looks up for its samples each owner has 1/k.
        within = np.full((k, k), 2 * looked_up_bytes * batch_size / k**2)
        within[np.arange(k), (np.arange(k) + 1) % k] += (k - 1) / k * 2 * dense_bytes
        np.fill_diagonal(within, 0.0)
        traffic[own, own] = within
    for index, (before, behind) in enumerate(pairwise(ranks)):
        sender, receiver = stages[index], stages[index + 1]
        rows = _rows_across(batch_size, num_microbatches, sender.num_replicas, receiver.num_replicas)
        across = rows * graph.layers[sender.last_layer].output_bytes_per_sample
        traffic[before, behind], traffic[behind, before] = across, across.T
    return traffic


def _rows_across(batch_size: int, num_microbatches: int, num_replicas: int, num_behind: int) -> Floats:
    """Return the rows of a batch that pass from each replica to each of the stage behind, in one direction."""
    rows = np.zeros((num_replicas, num_behind))
    for index in range(num_microbatches):
        num_rows = replica_slice(batch_size, num_microbatches, index).num_rows
        routes = routes_between(num_rows, num_replicas=num_replicas, num_peer_replicas=num_behind)
        rows[routes.replicas, routes.peer_replicas] += routes.num_rows
    return rows


def _best_places(between: Floats, hops: Floats, fits: NDArray[np.bool_]) -> Ints:
    """Return which node takes each place [N], the order of launch where nothing better is found."""
    generator = np.random.default_rng(0)
    begin = best = np.arange(len(fits))
    for _ in range(NUM_BEGINNINGS):
        found = _improved(begin, between, hops, fits)
        best = min(best, found, key=lambda places: _bytes_times_hops(places, between, hops))
        begin = begin.copy()
        for kind in np.unique(fits, axis=0):
            begin[kind] = generator.permutation(np.flatnonzero(kind))
    return best


def _bytes_times_hops(places: Ints, between: Floats, hops: Floats) -> float:
    return float((between * hops[np.ix_(places, places)]).sum())


def _improved(places: Ints, between: Floats, hops: Floats, fits: NDArray[np.bool_]) -> Ints:
    """Swap two nodes as long as it helps, always the best swap first."""
    places = places.copy()
    least_gain = _LEAST_GAIN * _bytes_times_hops(places, between, hops)
    while True:
        # `hops` is symmetric. What each node would cost at the place of each other, all else unchanged.
        distance = hops[np.ix_(places, places)]
        both_ways = between + between.T
        moved = both_ways @ distance
        stay = np.diag(moved)
        # The pair's own traffic was taken away twice, and is still there after the swap.
        change = moved + moved.T - stay[:, None] - stay[None, :] + 2 * both_ways * distance
        change[~fits] = 0.0
        node, other = np.unravel_index(change.argmin(), change.shape)
        if change[node, other] >= -least_gain:
            return places
        places[[node, other]] = places[[other, node]]
