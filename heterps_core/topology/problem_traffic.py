"""What passes between the ranks of a plan in one step, as far as a planning problem tells.

A model graph tells bytes (`rank_traffic.py`); a problem tells those across boundaries, and inside a stage the
seconds that they take.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.simulate.row_routes import routes_between
from heterps_core.plans.scheduling_plan import Stage, check_stages_cover_chain
from heterps_core.topology.rank_traffic import RankTraffic
from heterps_core.training.pipeline.stage_exchange import replica_slice


def problem_traffic(
    problem: SchedulingProblem, stages: Sequence[Stage], *, num_microbatches: int
) -> RankTraffic:
    """Count the bytes of a training step of a plan.

    Between neighbouring stages as in `plan_traffic`. Inside a stage the bytes are what fits through a unit's
    bandwidth in its communication seconds, 2 |W| per replica for dense layers and all pulls and pushes of the batch
    for sharded ones: over a ring (k - 1) / k of the former from each replica to the next, and 1 / k^2 of the latter
    between any two. Latencies that stand in the seconds count as bytes.

    Args:
        problem: The planning problem.
        stages: A plan for it.
        num_microbatches: That a batch is cut into, at least 1.

    Raises:
        ConfigurationError: The stages do not cover the chain.
    """
    check_stages_cover_chain(stages, problem.num_layers)
    counts = [stage.num_replicas for stage in stages]
    firsts = [sum(counts[:index]) for index in range(len(counts) + 1)]
    traffic = np.zeros((firsts[-1], firsts[-1]))
    for index, stage in enumerate(stages):
        inside = slice(firsts[index], firsts[index + 1])
        traffic[inside, inside] += _traffic_inside(problem, stage)
    for index in range(len(stages) - 1):
        width_bytes = problem.layers[stages[index].last_layer].output_bytes_per_sample
        before = slice(firsts[index], firsts[index + 1])
        behind = slice(firsts[index + 1], firsts[index + 2])
        rows = _rows_across(problem.batch_size, num_microbatches, counts[index], counts[index + 1])
        traffic[before, behind] += rows * width_bytes
        traffic[behind, before] += rows.T * width_bytes
    return RankTraffic(
        replicas_per_stage=tuple(counts),
        device_types=tuple(stage.device_type for stage in stages for _ in range(stage.num_replicas)),
        bytes_per_step=traffic,
    )


def _traffic_inside(problem: SchedulingProblem, stage: Stage) -> Floats:
    k = stage.num_replicas
    layers = problem.layers[stage.first_layer : stage.last_layer + 1]
    bandwidth = problem.device_types[stage.device_type].bandwidth_bytes_per_s
    exchanged_bytes, all_reduced_bytes = (
        bandwidth
        * problem.batch_size
        / problem.profile_batch_size
        * sum(
            layer.communication_seconds[stage.device_type] for layer in layers if layer.is_sharded is sharded
        )
        for sharded in (True, False)
    )
    traffic = np.full((k, k), exchanged_bytes / k**2)
    np.fill_diagonal(traffic, 0.0)
    if k > 1:
        ring = np.arange(k)
        traffic[ring, (ring + 1) % k] += (k - 1) / k * all_reduced_bytes
    return traffic


def _rows_across(batch_size: int, num_microbatches: int, num_replicas: int, num_behind: int) -> Floats:
    """Return the rows of a batch that pass from each replica to each of the stage behind, in one direction."""
    rows = np.zeros((num_replicas, num_behind))
    for index in range(num_microbatches):
        num_rows = replica_slice(batch_size, num_microbatches, index).num_rows
        routes = routes_between(num_rows, num_replicas=num_replicas, num_peer_replicas=num_behind)
        rows[routes.replicas, routes.peer_replicas] += routes.num_rows
    return rows
