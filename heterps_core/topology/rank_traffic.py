"""Who sends how many bytes to whom in one training step: the process graph that a placement is made for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from heterps_core.models.model_graph import ModelGraph
from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.simulate.row_routes import routes_between
from heterps_core.plans.scheduling_plan import Stage, check_stages_cover_chain
from heterps_core.training.pipeline.stage_exchange import replica_slice


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

    Between adjacent stages the rows where the slices overlap, as activations forward and gradients back. Inside
    a stage a ring for the dense gradients, 2 (k - 1) / k of their bytes from each replica to the next; and between
    any two replicas the rows of embeddings that one looks up and the other owns, with their gradients. Ignored:
    row indices, and that a row which occurs twice in a batch travels once.

    Args:
        graph: The model.
        stages: A plan for it.
        batch_size: Samples of a step, at least 1.
        num_microbatches: At least 1.

    Raises:
        ConfigurationError: The stages do not cover the chain.
    """

    def inside(stage: Stage) -> tuple[float, float]:
        layers = graph.layers[stage.first_layer : stage.last_layer + 1]
        looked_up_bytes = sum(layer.looked_up_bytes_per_sample for layer in layers if layer.is_sharded)
        dense_bytes = sum(layer.parameter_bytes for layer in layers if not layer.is_sharded)
        return 2 * looked_up_bytes * batch_size, 2 * dense_bytes

    widths = [layer.output_bytes_per_sample for layer in graph.layers]
    return _traffic(stages, widths, inside, batch_size=batch_size, num_microbatches=num_microbatches)


def problem_traffic(
    problem: SchedulingProblem, stages: Sequence[Stage], *, num_microbatches: int
) -> RankTraffic:
    """Count the bytes of a training step of a plan, as far as a planning problem tells them.

    As `plan_traffic`, but the bytes inside a stage are what fits through a unit's bandwidth in its communication
    seconds. Latencies that are part of these seconds count as bytes.

    Args:
        problem: The planning problem.
        stages: A plan for it.
        num_microbatches: That a batch is cut into, at least 1.

    Raises:
        ConfigurationError: The stages do not cover the chain.
    """
    scale = problem.batch_size / problem.profile_batch_size

    def inside(stage: Stage) -> tuple[float, float]:
        name = stage.device_type
        layers = problem.layers[stage.first_layer : stage.last_layer + 1]
        exchanged_seconds, all_reduced_seconds = (
            sum(layer.communication_seconds[name] for layer in layers if layer.is_sharded is sharded)
            for sharded in (True, False)
        )
        bytes_per_s = problem.device_types[name].bandwidth_bytes_per_s * scale
        return bytes_per_s * exchanged_seconds, bytes_per_s * all_reduced_seconds

    widths = [layer.output_bytes_per_sample for layer in problem.layers]
    return _traffic(stages, widths, inside, batch_size=problem.batch_size, num_microbatches=num_microbatches)


def _traffic(
    stages: Sequence[Stage],
    output_bytes_per_sample: Sequence[float],
    inside: Callable[[Stage], tuple[float, float]],
    *,
    batch_size: int,
    num_microbatches: int,
) -> RankTraffic:
    """Return the traffic of stages, of which `inside` tells the bytes that all replicas exchange and all-reduce."""
    check_stages_cover_chain(stages, len(output_bytes_per_sample))
    counts = [stage.num_replicas for stage in stages]
    firsts = [sum(counts[:index]) for index in range(len(counts) + 1)]
    ranks = [slice(first, last) for first, last in pairwise(firsts)]
    traffic = np.zeros((firsts[-1], firsts[-1]))
    for stage, own, k in zip(stages, ranks, counts, strict=True):
        exchanged_bytes, all_reduced_bytes = inside(stage)
        # Of the rows that one replica looks up for its samples each owner has 1/k.
        within = np.full((k, k), exchanged_bytes / k**2)
        within[np.arange(k), (np.arange(k) + 1) % k] += (k - 1) / k * all_reduced_bytes
        np.fill_diagonal(within, 0.0)
        traffic[own, own] = within
    for index, (before, behind) in enumerate(pairwise(ranks)):
        rows = _rows_across(batch_size, num_microbatches, counts[index], counts[index + 1])
        across = rows * output_bytes_per_sample[stages[index].last_layer]
        traffic[before, behind], traffic[behind, before] = across, across.T
    return RankTraffic(
        replicas_per_stage=tuple(counts),
        device_types=tuple(stage.device_type for stage in stages for _ in range(stage.num_replicas)),
        bytes_per_step=traffic,
    )


def _rows_across(batch_size: int, num_microbatches: int, num_replicas: int, num_behind: int) -> Floats:
    """Return the rows of a batch that pass from each replica to each of the stage behind, in one direction."""
    rows = np.zeros((num_replicas, num_behind))
    for index in range(num_microbatches):
        num_rows = replica_slice(batch_size, num_microbatches, index).num_rows
        routes = routes_between(num_rows, num_replicas=num_replicas, num_peer_replicas=num_behind)
        rows[routes.replicas, routes.peer_replicas] += routes.num_rows
    return rows
