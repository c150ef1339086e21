"""Who sends how many bytes to whom in one training step: the process graph that a placement is made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heterps_core.models.model_graph import ModelGraph
from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.plans.scheduling_plan import Stage, check_stages_cover_chain
from heterps_core.training.pipeline.stage_exchange import replica_slice, routes_to_neighbour


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTraffic:
    """Ranks in the order of stages, then replicas, and what passes between them."""

    replicas_per_stage: tuple[int, ...]
    device_types: tuple[str, ...]
    """What each rank must run on."""

    bytes_per_step: Floats
    """From row to column, shape (ranks, ranks), 0 on the diagonal."""


def plan_traffic(
    graph: ModelGraph, stages: Sequence[Stage], *, batch_size: int, num_microbatches: int
) -> RankTraffic:
    """Count the bytes of a training step of a plan.

    Between neighbouring stages the rows where the slices overlap, as activations forward and gradients back. Inside
    a stage a ring for the dense gradients, 2 (k - 1) / k of their bytes from each replica to the next; and between
    any two replicas the rows of embeddings that one looks up and the other owns, with their gradients. Ignored:
    row numbers, and that a row which occurs twice in a batch travels once.

    Args:
        graph: The model.
        stages: A plan for it.
        batch_size: Samples of a step, at least 1.
        num_microbatches: At least 1.

    Raises:
        ConfigurationError: The stages do not cover the chain.
    """
    check_stages_cover_chain(stages, len(graph.layers))
    counts = [stage.num_replicas for stage in stages]
    firsts = [sum(counts[:index]) for index in range(len(counts) + 1)]
    traffic = np.zeros((firsts[-1], firsts[-1]))
    for index, stage in enumerate(stages):
        inside = slice(firsts[index], firsts[index + 1])
        traffic[inside, inside] += _traffic_inside(graph, stage, batch_size)
    for index in range(len(stages) - 1):
        width_bytes = graph.layers[stages[index].last_layer].output_bytes_per_sample
        before = slice(firsts[index], firsts[index + 1])
        behind = slice(firsts[index + 1], firsts[index + 2])
        rows = _rows_across(counts[index], counts[index + 1], batch_size, num_microbatches)
        traffic[before, behind] += rows * width_bytes
        traffic[behind, before] += rows.T * width_bytes
    return RankTraffic(
        replicas_per_stage=tuple(counts),
        device_types=tuple(stage.device_type for stage in stages for _ in range(stage.num_replicas)),
        bytes_per_step=traffic,
    )


def _traffic_inside(graph: ModelGraph, stage: Stage, batch_size: int) -> Floats:
    k = stage.num_replicas
    layers = graph.layers[stage.first_layer : stage.last_layer + 1]
    dense_bytes = sum(layer.parameter_bytes for layer in layers if not layer.is_sharded)
    looked_up_bytes = sum(layer.looked_up_bytes_per_sample for layer in layers if layer.is_sharded)
    # Of the rows that one replica looks up for its samples each owner has 1/k; gradients go back the same way.
    traffic = np.full((k, k), 2 * looked_up_bytes * batch_size / k / k)
    np.fill_diagonal(traffic, 0.0)
    if k > 1:
        ring = np.arange(k)
        traffic[ring, (ring + 1) % k] += 2 * (k - 1) / k * dense_bytes
    return traffic


def _rows_across(num_replicas: int, num_behind: int, batch_size: int, num_microbatches: int) -> Floats:
    """Return the rows of a batch that pass from each replica to each of the stage behind, in one direction."""
    rows = np.zeros((num_replicas, num_behind))
    for index in range(num_microbatches):
        num_rows = replica_slice(batch_size, num_microbatches, index).num_rows
        for replica in range(num_replicas):
            for route in routes_to_neighbour(
                num_rows, num_replicas=num_replicas, replica=replica, num_peer_replicas=num_behind
            ):
                rows[replica, route.peer_replica] += route.stop - route.first
    return rows
