"""The cost of one stage by the plain formulas of `step_model.py` and `disk_sweep.py`, one number after the other.

The planner computes all stages at once, as arrays; this is what its tests compare with.
"""

from __future__ import annotations

from math import inf
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
    drained_seconds: float = 0.0
    reading_seconds: float = 0.0

    @property
    def communication_seconds(self) -> float:
        return self.exchange_seconds + self.links_seconds

    @property
    def seconds(self) -> float:
        in_memory = self.exchange_seconds + max(self.compute_seconds, self.links_seconds)
        return max(in_memory, self.drained_seconds, self.reading_seconds, self.sweep_seconds or 0.0)


def plain_stage(problem: SchedulingProblem, stage: Stage, *, num_microbatches: int = 1) -> PlainStage:
    """Return the times of one stage with its replicas, and what one of them holds."""
    unit, k = problem.device_types[stage.device_type], stage.num_replicas
    layers = problem.layers[stage.first_layer : stage.last_layer + 1]
    whole = sum(layer.state_bytes for layer in layers if not layer.is_sharded)
    sharded = sum(layer.state_bytes for layer in layers if layer.is_sharded)
    pacing, reading = float(k), 0.0
    if problem.step_model is StepModel.TRAINER:
        pacing = float(pacing_replicas(problem.batch_size // num_microbatches, k))
        reading = sum(layer.reading_seconds.get(stage.device_type, 0.0) for layer in layers)
        reading *= problem.batch_size / problem.profile_batch_size / pacing
    compute, exchange, links = _in_memory(problem, stage, pacing, num_microbatches)
    memory_bytes = whole + sharded / k
    held = PlainStage(compute, exchange, links, None, memory_bytes, reading_seconds=reading)
    in_memory = _drained(problem, stage, held, pacing, num_microbatches)
    if memory_bytes <= unit.usable_bytes * (1 + 1e-12):
        return in_memory
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
        swept = PlainStage(compute + work, exchange, links, disk, unit.usable_bytes, reading_seconds=reading)
        sweeps.append(_drained(problem, stage, swept, pacing, num_microbatches))
    return min(sweeps, key=lambda each: each.seconds, default=in_memory)


def _drained(problem: SchedulingProblem, stage: Stage, part: PlainStage, k: float, m: int) -> PlainStage:
    """Return the stage with the least time of a step that drains; passes are a third forward, a third put off."""
    if not problem.drains:
        return part
    name, unit = stage.device_type, problem.device_types[stage.device_type]
    layers = problem.layers[stage.first_layer : stage.last_layer + 1]
    work = sum(layer.compute_seconds[name] for layer in layers)
    connected = sum(layer.compute_seconds[name] for layer in layers if layer.kind == "fully_connected")
    put_off = connected / work / 3 if work else 0.0
    before = _before(problem, stage.first_layer, m)
    is_last = stage.last_layer == problem.num_layers - 1
    to_left = 0.0
    if stage.first_layer:
        to_left = 2 * problem.batch_size * problem.layers[stage.first_layer - 1].output_bytes_per_sample
    to_right = 0.0 if is_last else 2 * problem.batch_size * layers[-1].output_bytes_per_sample
    gradient = to_left / unit.bandwidth_bytes_per_s / k / m
    messages = (to_left + to_right) / unit.bandwidth_bytes_per_s / k
    summed = part.links_seconds - messages
    if stage.first_layer and not is_last:
        around = part.exchange_seconds / 2 / m + part.compute_seconds * (2 / 3 - put_off) / m
    else:
        around = part.exchange_seconds / m + part.compute_seconds * (1 - put_off) / m
    return part._replace(
        drained_seconds=max(
            part.exchange_seconds + part.compute_seconds + summed,
            part.exchange_seconds + part.compute_seconds * (1 - put_off) + gradient + before,
            messages + gradient + around + max(summed, before),
        )
    )


def _before(problem: SchedulingProblem, first_layer: int, m: int) -> float:
    """Return the least time of a micro-batch, forward and backward, in the layers before a stage."""
    seconds = 0.0
    rows = problem.batch_size // m
    for layer in problem.layers[:first_layer]:
        least = inf
        for name, unit in problem.device_types.items():
            fewest_rows = rows // min(unit.max_units, rows)
            alpha, samples = unit.compute_parallel_fraction, problem.batch_size / problem.profile_batch_size
            each = (1 - alpha) + alpha * samples / m * fewest_rows / rows
            least = min(least, layer.compute_seconds[name] * each)
        seconds += least * (2 / 3 if layer.kind == "fully_connected" else 1)
    return seconds


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
    handling = 0.0
    if k > 1 or problem.single_replica_communicates:
        exchanged_bytes = sum(layer.exchanged_bytes for layer in layers if layer.is_sharded)
        exchanged_bytes *= 1 - beta + beta * scale / k
        num_tables, requests = sum(layer.is_sharded for layer in layers), problem.batch_size / 4096
        if num_tables:
            handling = unit.exchange_seconds * (2 + requests / k)
            handling += unit.exchange_seconds_per_peer * (2 * (k - 1) + requests)
        handling += num_tables * unit.exchange_seconds_per_table
        handling += exchanged_bytes * unit.exchange_seconds_per_byte
        gradient_bytes = sum(layer.exchanged_bytes for layer in layers if not layer.is_sharded)
        handling += 2 * crossing * gradient_bytes * unit.sum_seconds_per_byte
        handling += (k - 1) * unit.sum_seconds_per_peer if gradient_bytes else 0.0
    num_boundaries = (stage.first_layer > 0) + (stage.last_layer < problem.num_layers - 1)
    messages = m * num_boundaries * unit.boundary_seconds
    messages += 2 * problem.batch_size * cut_bytes / k * unit.boundary_seconds_per_byte
    is_last = stage.last_layer == problem.num_layers - 1
    if stage.first_layer and (is_last or any(layer.is_sharded for layer in layers)):
        messages += unit.later_reading_seconds
        messages += problem.batch_size / k * unit.later_reading_seconds_per_sample
    return (
        work * (m * (1 - alpha) + alpha * scale / k) + messages,
        crossing * rows * (1 - beta + beta * scale / k) + handling,
        boundary * scale / k + crossing * (traffic - rows) * scale,
    )
