"""Tables of the runs of consecutive layers of a problem: all of them, or those of one plan.

Shape legend: L = layers, T = device types, G = L (L + 1) / 2 runs of layers ordered by (last, first).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats, Ints, run_layers
from heterps_core.planning.cost_model.disk_sweep import sweep_terms
from heterps_core.planning.cost_model.drained_paths import drained_paths
from heterps_core.planning.cost_model.instance_cover import NANO_USD_PER_USD, InstanceCover, PriceStairs
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.cost_model.reserved_machines import ReservedMachines
from heterps_core.planning.cost_model.stage_cost import (
    COMPARISON_TOLERANCE,
    is_within,
    replica_memory_bytes,
)
from heterps_core.planning.cost_model.stage_table import StageTable
from heterps_core.planning.cost_model.start_terms import StartTerms
from heterps_core.planning.cost_model.step_model import num_microbatches_of, scale_and_fraction
from heterps_core.planning.cost_model.trainer_terms import TrainerTerms
from heterps_core.planning.problem.extra_costs import Reserved
from heterps_core.planning.problem.scheduling_problem import (
    MAX_DEVICE_TYPES,
    LayerCosts,
    SchedulingProblem,
    StepModel,
    UnitType,
)
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.profiling.replica_path import MESSAGES_OF_STEP
from heterps_core.training.job import ROWS_AT_ONCE

LEAST_USD_PER_HOUR = 1 / NANO_USD_PER_USD
"""Least price of a unit in tables: where machines cost nothing, a search still takes few of them for a short time.
Reports have the true price."""


def segment_table(problem: SchedulingProblem, *, num_microbatches: int = 1) -> StageTable:
    """Return every run of consecutive layers on every device type, shape (G, T).

    Run (first a, last b) has the row b (b + 1) / 2 + a, see `segment_row`. The number of micro-batches matters for
    the trainer's step.
    """
    last, first = np.tril_indices(problem.num_layers)
    return _stage_table(problem, num_microbatches, first, last, _sums_of_all_runs)


def run_table(
    problem: SchedulingProblem, runs: Sequence[tuple[int, int]], *, num_microbatches: int | None = None
) -> StageTable:
    """Return the runs of layers first..last of one plan on every device type, shape (runs, T).

    By default with the micro-batches of a plan of so many stages.
    """
    first, last = np.array(runs).T
    return _stage_table(
        problem,
        num_microbatches or num_microbatches_of(problem, len(runs)),
        first,
        last,
        lambda values: np.array([sum(values[begin : end + 1]) for begin, end in runs], dtype=np.float64),
    )


def plan_table(
    problem: SchedulingProblem, stages: Sequence[Stage], *, num_microbatches: int | None = None
) -> StageTable:
    """Return the stages of one plan on their own device types, shape (S,); see `run_table`."""
    names = problem.device_type_names
    types = np.array([names.index(stage.device_type) for stage in stages])
    runs = [(stage.first_layer, stage.last_layer) for stage in stages]
    table = run_table(problem, runs, num_microbatches=num_microbatches)
    return table.take(np.arange(len(runs)) * len(names) + types)


def _stage_table(
    problem: SchedulingProblem,
    num_microbatches: int,
    first: Ints,
    last: Ints,
    sums: Callable[[Sequence[float]], Floats],
) -> StageTable:
    """Return a table of runs; `sums` adds a value of each layer up over each run."""
    units, layers = tuple(problem.device_types.values()), problem.layers
    scale = problem.batch_size / problem.profile_batch_size
    is_trainers = problem.step_model is StepModel.TRAINER

    def by_type(values: Callable[[LayerCosts, str], float]) -> Floats:
        return np.stack([sums([values(layer, name) for layer in layers]) for name in problem.device_types], 1)

    compute_scale, compute_fraction = scale_and_fraction(
        problem, np.array([unit.compute_parallel_fraction for unit in units]), num_microbatches
    )
    communication_scale, communication_fraction = scale_and_fraction(
        problem, np.array([unit.communication_parallel_fraction for unit in units]), 1
    )
    # Activations cross forward, their gradients back; nothing at the ends of the chain.
    cut_bytes = np.array([0.0, *(layer.output_bytes_per_sample for layer in layers[:-1]), 0.0])
    bandwidth = np.array([unit.bandwidth_bytes_per_s for unit in units])
    crossing_bytes = 2 * problem.profile_batch_size * (cut_bytes[first] + cut_bytes[last + 1])
    across = crossing_bytes[:, None] / bandwidth
    trainer = None
    if is_trainers:
        rows_seconds = by_type(lambda layer, name: layer.communication_seconds[name] * layer.is_sharded)
        rows_seconds *= communication_scale
        num_tables = sums([layer.is_sharded for layer in layers])
        has_tables = (num_tables > 0)[:, None]
        requests = problem.batch_size / ROWS_AT_ONCE
        message_seconds = has_tables * [unit.exchange_seconds for unit in units]
        peer_seconds = has_tables * [unit.exchange_seconds_per_peer for unit in units]
        row_bytes = sums([layer.exchanged_bytes * layer.is_sharded for layer in layers])[:, None]
        work_seconds = communication_scale * row_bytes * [unit.exchange_seconds_per_byte for unit in units]
        gradient_bytes = sums([layer.exchanged_bytes * (not layer.is_sharded) for layer in layers])[:, None]
        num_boundaries = 2.0 - (first == 0) - (last == problem.num_layers - 1)
        reads_later = ((first > 0) & ((num_tables > 0) | (last == problem.num_layers - 1)))[:, None]
        trainer = TrainerTerms(
            fixed_seconds=rows_seconds * (1 - communication_fraction)
            + 2 * gradient_bytes * [unit.sum_seconds_per_byte for unit in units],
            shared_seconds=rows_seconds * communication_fraction,
            meeting_seconds=MESSAGES_OF_STEP * message_seconds
            + requests * peer_seconds
            + num_tables[:, None] * [unit.exchange_seconds_per_table for unit in units]
            + work_seconds * (1 - communication_fraction),
            peer_seconds=MESSAGES_OF_STEP * peer_seconds
            + (gradient_bytes > 0) * [unit.sum_seconds_per_peer for unit in units],
            work_seconds=work_seconds * communication_fraction + requests * message_seconds,
            sum_seconds=scale
            * by_type(lambda layer, name: layer.communication_seconds[name] * (not layer.is_sharded)),
            boundary_fixed_seconds=num_microbatches
            * num_boundaries[:, None]
            * [unit.boundary_seconds for unit in units]
            + reads_later * [unit.later_reading_seconds for unit in units],
            boundary_shared_seconds=scale
            * crossing_bytes[:, None]
            * [unit.boundary_seconds_per_byte for unit in units]
            + problem.batch_size * reads_later * [unit.later_reading_seconds_per_sample for unit in units],
            reading_seconds=scale * by_type(lambda layer, name: layer.reading_seconds.get(name, 0.0)),
            single_replica_communicates=problem.single_replica_communicates,
            microbatch_rows=problem.batch_size // num_microbatches,
            drained_paths=drained_paths(problem, num_microbatches, first, last, by_type)
            if problem.drains
            else (),
        )
        communication_seconds, across_fraction = across * scale, np.ones(len(units))
    else:
        traffic = by_type(lambda layer, name: layer.communication_seconds[name])
        communication_seconds, across_fraction = (traffic + across) * scale, communication_fraction
    shared_bytes = sums([layer.state_bytes * layer.is_sharded for layer in layers])[:, None]
    memory_replicas = _least_memory_replicas(
        sums([layer.state_bytes * (not layer.is_sharded) for layer in layers])[:, None],
        shared_bytes,
        np.array([unit.usable_bytes for unit in units]),
    )
    covers = {index: _cover_prices(unit) for index, unit in enumerate(units) if unit.instances}
    reserved = {index: unit.reserved for index, unit in enumerate(units) if unit.reserved}
    with_reserved = {index: _reserved_prices(covers[index][0], each) for index, each in reserved.items()}
    has_lone_replicas = not is_trainers and not problem.single_replica_communicates
    return StageTable(
        compute_seconds=by_type(lambda layer, name: layer.compute_seconds[name]) * compute_scale,
        communication_seconds=communication_seconds,
        trainer=trainer,
        single_communication_seconds=across * scale if has_lone_replicas else None,
        memory_replicas=memory_replicas,
        start=_start_terms(problem, shared_bytes, memory_replicas),
        sweep=sweep_terms(problem, sums),
        compute_parallel_fraction=compute_fraction,
        communication_parallel_fraction=across_fraction,
        price_usd_per_hour=np.array([max(unit.price_usd_per_hour, LEAST_USD_PER_HOUR) for unit in units]),
        max_units=np.array([unit.max_units for unit in units], dtype=np.float64),
        machine_units=np.array([unit.machine_units for unit in units], dtype=np.float64)
        if any(unit.machine_units > 1 for unit in units)
        else None,
        interruptions_per_hour=objective_of(problem).interruptions_per_hour,
        type_indices=np.arange(len(units)),
        covers=PriceStairs(
            {index: prices for index, (prices, _) in covers.items()}
            | {index: prices[-1] for index, prices in with_reserved.items()}
        ),
        reserved=ReservedMachines({index: each.name for index, each in reserved.items()}, with_reserved),
        on_demand_usd=PriceStairs(
            {
                index: extra
                for index, (_, extra) in covers.items()
                # One of the plan's stages has a reserved machine then.
                if units[index].on_demand_instances is not None and index not in reserved
            }
        ),
    )


def _start_terms(
    problem: SchedulingProblem, shared_bytes: Floats, memory_replicas: Floats
) -> StartTerms | None:
    """Return when stages are ready; None where start-up is not charged, or all begin at once."""
    units = tuple(problem.device_types.values())
    if problem.extra_costs.startup_seconds == 0 or not any(
        unit.startup_seconds or unit.load_seconds_per_byte for unit in units
    ):
        return None
    num_steps = problem.num_steps * (1 + problem.pause_share)
    rates = np.array([unit.load_seconds_per_byte for unit in units])
    of_disks = np.array([unit.disk_load_seconds_per_byte for unit in units])
    return StartTerms(
        fixed_seconds=np.array([unit.startup_seconds for unit in units]) / num_steps,
        shared_seconds=shared_bytes * rates / num_steps,
        shared_on_disk=shared_bytes * np.maximum(rates, of_disks) / num_steps,
        memory_replicas=memory_replicas,
    )


@lru_cache(maxsize=MAX_DEVICE_TYPES)  # with less than a problem has, each look-up would miss
def _cover_prices(unit: UnitType) -> tuple[Floats, Floats]:
    """Return the prices of 0..max_units units, and what it adds that one instance is on-demand."""
    cover = InstanceCover.of(
        unit.instances, most_units=unit.max_units, on_demand=unit.on_demand_instances or ()
    )
    counts = range(unit.max_units + 1)
    prices = np.array([0.0, *map(cover.price_usd_per_hour, counts[1:])])
    added = np.array([0.0, *map(cover.steady_usd_per_hour, counts[1:])]) - prices
    return np.maximum(prices, LEAST_USD_PER_HOUR * np.array(counts)), added


def _reserved_prices(prices: Floats, reserved: Reserved) -> Floats:
    """Return the prices of 0..max_units units, of which 0..count reserved instances carry some."""
    counts = np.arange(prices.size)
    carried = reserved.units * np.arange(reserved.count + 1)[:, None]
    return np.asarray(np.maximum(prices[np.maximum(0, counts - carried)], LEAST_USD_PER_HOUR * counts))


def segment_row(first_layer: int, last_layer: int) -> int:
    """Return the row of a run of layers in `segment_table`."""
    return last_layer * (last_layer + 1) // 2 + first_layer


def segment_layers(row: int) -> tuple[int, int]:
    """Return first and last layer of a row of `segment_table`."""
    first_layer, last_layer = run_layers(np.array(row))
    return int(first_layer), int(last_layer)


def rows_of_stages(problem: SchedulingProblem, stages: Sequence[Stage]) -> Ints:
    """Return the flat indices run * T + type of stages, in order."""
    names = problem.device_type_names
    runs = np.array([segment_row(stage.first_layer, stage.last_layer) for stage in stages])
    types = np.array([names.index(stage.device_type) for stage in stages])
    return np.asarray(runs * len(names) + types)


def stages_of_rows(problem: SchedulingProblem, rows: Ints) -> tuple[Stage, ...]:
    """Return the stages with these flat indices run * T + type, in order, of one replica each."""
    names = problem.device_type_names
    return tuple(
        Stage(*segment_layers(row // len(names)), names[row % len(names)], 1) for row in rows.tolist()
    )


def _least_memory_replicas(replicated_bytes: Floats, sharded_bytes: Floats, memory_bytes: Floats) -> Floats:
    """Return the least k with replicated + sharded / k <= memory; infinite where none is enough."""
    limit_bytes = memory_bytes * (1 + COMPARISON_TOLERANCE)
    with np.errstate(divide="ignore", invalid="ignore"):
        replicas = np.maximum(np.ceil(sharded_bytes / (limit_bytes - replicated_bytes)), 1.0)
    replicas = np.where(sharded_bytes == 0, 1.0, replicas)
    replicas = np.where(replicated_bytes > limit_bytes, np.inf, replicas)
    # The quotient may be a rounding error off a whole number; the comparison itself decides.
    fewer = np.maximum(replicas - 1, 1.0)
    enough = is_within(replica_memory_bytes(replicated_bytes, sharded_bytes, fewer), memory_bytes)
    return np.where(enough, fewer, replicas)


def _sums_of_all_runs(values: Sequence[float]) -> Floats:
    """Return the sums over all runs of consecutive values, shape (G,).

    Summed from each first value onwards: differences of prefix sums would lose the digits of small runs.
    """
    num_values = len(values)
    sums = np.cumsum(
        np.triu(np.broadcast_to(np.asarray(values, dtype=np.float64), (num_values,) * 2)), axis=1
    )
    last, first = np.tril_indices(num_values)
    return np.asarray(sums[first, last])
