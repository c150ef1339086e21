"""The order of a launched cluster's nodes, by where they turned out to stand in the network.

Replicas are numbered over the nodes of a stage in the cluster's order, and those of adjacent stages that work on the
same rows exchange activations: so the order decides how many switches these cross.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from heterps_core.cluster import Cluster
from heterps_core.hardware import Market
from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.topology.rank_placement import best_places
from heterps_core.topology.rank_traffic import RankTraffic


def near_order(cluster: Cluster, network_paths: Mapping[str, Sequence[str]], traffic: RankTraffic) -> Cluster:
    """Return a cluster whose nodes that exchange most are near one another, with the rendezvous in their middle.

    Nodes of a stage with equally many workers change places, so that the sum over all pairs of bytes times hops is
    small. The rendezvous host is an on-demand node where there is one, of these the one with the fewest hops to all.

    Args:
        cluster: As it was launched.
        network_paths: By node id the nodes of the network above a machine, from the top down; machines that share
            more of them are nearer. One that is missing counts as far from all.
        traffic: Between the ranks of the cluster.
    """
    nodes = cluster.nodes
    hops = network_hops([network_paths.get(node.node_id, ()) for node in nodes])
    firsts = np.cumsum([0, *traffic.replicas_per_stage])
    runs = np.zeros((len(nodes), firsts[-1]))
    for index, node in enumerate(nodes):
        runs[index, firsts[node.stage] + np.array(cluster.replicas_of(node))] = 1.0
    between = runs @ traffic.bytes_per_step @ runs.T
    np.fill_diagonal(between, 0.0)
    kinds = np.array([(node.stage, node.num_workers) for node in nodes])
    places = best_places(between, hops, (kinds[:, None] == kinds).all(axis=-1))
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
