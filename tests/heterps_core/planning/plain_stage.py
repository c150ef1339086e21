"""The cost of one stage by the plain formulas of `step_model.py` and `disk_sweep.py`, one number after the other.

The planner computes all stages at once, as arrays; this is what its tests compare with.
"""

from __future__ import annotations

from typing import NamedTuple

from heterps_core.planning.cost_model.disk_sweep import ROW_SHARE, SLOT_FACTOR, SWEEPS_IN_MEMORY
from heterps_core.planning.cost_model.step_model import pacing_replicas
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from heterps_core.plans.scheduling_plan import Stage


class PlainStage(NamedTuple):
    """Times for one training batch."""

    compute_seconds: float
    exchange_seconds: float
    links_seconds: float
    sweep_seconds: float | None
    memory_bytes: float

    @property
    def communication_seconds(self) -> float:
        return self.exchange_seconds + self.links_seconds

    @property
    def seconds(self) -> float:
        in_memory = self.exchange_seconds + max(self.compute_seconds, self.links_seconds)
        return max(in_memory, self.sweep_seconds or 0.0)


def plain_stage(problem: SchedulingProblem, stage: Stage, *, num_microbatches: int = 1) -> PlainStage:
    """Return the times of one stage with its replicas, and what one of them holds."""
    unit, k = problem.device_types[stage.device_type], stage.num_replicas
    layers = problem.layers[stage.first_layer : stage.last_layer + 1]
    whole = sum(layer.state_bytes for layer in layers if not layer.is_sharded)
    sharded = sum(layer.state_bytes for layer in layers if layer.is_sharded)
    pacing = float(k)
    if problem.step_model is StepModel.TRAINER:
        pacing = float(pacing_replicas(problem.batch_size // num_microbatches, k))
    compute, exchange, links = _in_memory(problem, stage, pacing, num_microbatches)
    memory_bytes = whole + sharded / k
    if memory_bytes <= unit.usable_bytes * (1 + 1e-12):
        return PlainStage(compute, exchange, links, None, memory_bytes)
    tables = sum(layer.state_bytes for layer in layers if layer.cold_bytes_per_sample)
    resident = sharded - tables
    sweeps = []
    for index, share in enumerate(problem.hot_shares):
        cold = problem.batch_size * sum(
            sum(layer.cold_bytes_per_sample[index : index + 1]) for layer in layers
        )
        left = k * (unit.usable_bytes - whole) - resident - (ROW_SHARE + SLOT_FACTOR * share) * tables
        if (
            not unit.disk_bytes
            or left < SWEEPS_IN_MEMORY * SLOT_FACTOR * cold
            or tables / k > unit.disk_bytes
        ):
            continue
        steps = left / (SWEEPS_IN_MEMORY * SLOT_FACTOR * cold)
        disk, work = (
            2 * tables / k / unit.disk_bytes_per_s / steps,
            unit.sweep_seconds_per_byte * cold / pacing,
        )
        sweeps.append((max(exchange + max(compute + work, links), disk), disk, work))
    if not sweeps:
        return PlainStage(compute, exchange, links, None, memory_bytes)
    _, disk, work = min(sweeps, key=lambda sweep: sweep[0])
    return PlainStage(compute + work, exchange, links, disk, unit.usable_bytes)


def _in_memory(
    problem: SchedulingProblem, stage: Stage, k: float, num_microbatches: int
) -> tuple[float, float, float]:
    """Return CT, XT, and YT + AT (in the papers' model CT, 0 and DT)."""
    unit, name = problem.device_types[stage.device_type], stage.device_type
    layers = problem.layers[stage.first_layer : stage.last_layer + 1]
    scale = problem.batch_size / problem.profile_batch_size
    alpha, beta = unit.compute_parallel_fraction, unit.communication_parallel_fraction
    cut_bytes = (layers[-1].output_bytes_per_sample if stage.last_layer < problem.num_layers - 1 else 0) + (
        problem.layers[stage.first_layer - 1].output_bytes_per_sample if stage.first_layer else 0
    )
    boundary = 2 * problem.profile_batch_size * cut_bytes / unit.bandwidth_bytes_per_s
    work = sum(layer.compute_seconds[name] for layer in layers)
    traffic = sum(layer.communication_seconds[name] for layer in layers)
    rows = sum(layer.communication_seconds[name] for layer in layers if layer.is_sharded)
    if problem.step_model is StepModel.PAPERS:
        if k == 1 and not problem.single_replica_communicates:
            traffic = 0.0
        return (
            work * scale * (1 - alpha + alpha / k),
            0.0,
            (traffic + boundary) * scale * (1 - beta + beta / k),
        )
    m, crossing = num_microbatches, 1.0 if problem.single_replica_communicates else 1 - 1 / k
    return (
        work * (m * (1 - alpha) + alpha * scale / k),
        crossing * rows * (m * (1 - beta) + beta * scale / k),
        boundary * scale / k + crossing * (traffic - rows) * scale,
    )
