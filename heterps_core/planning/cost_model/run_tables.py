"""Tables of the runs of consecutive layers of a problem: all of them, or those of one plan.

Shape legend: L = layers, T = device types, G = L (L + 1) / 2 runs of layers ordered by (last, first).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.planning.cost_model.disk_sweep import sweep_terms
from heterps_core.planning.cost_model.instance_cover import NANO_USD_PER_USD, InstanceCover
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.cost_model.partition_sums import run_layers
from heterps_core.planning.cost_model.stage_cost import (
    COMPARISON_TOLERANCE,
    boundary_seconds,
    is_within,
    replica_memory_bytes,
)
from heterps_core.planning.cost_model.stage_table import StageTable
from heterps_core.planning.cost_model.step_model import num_microbatches_of, step_terms
from heterps_core.planning.cost_model.trainer_terms import TrainerTerms
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel, UnitType
from heterps_core.plans.scheduling_plan import Stage

LEAST_USD_PER_HOUR = 1 / NANO_USD_PER_USD
"""Of a unit in tables: where machines cost nothing, a search still takes few of them for a short time. Prices are
told apart by so much, and what is reported has the price itself."""


def segment_table(problem: SchedulingProblem, *, num_microbatches: int = 1) -> StageTable:
    """Return every run of consecutive layers on every device type, shape (G, T).

    Run (first a, last b) has the row b (b + 1) / 2 + a, see `segment_row`. The number of micro-batches matters for
    the trainer's step.
    """
    last, first = np.tril_indices(problem.num_layers)
    return _stage_table(problem, num_microbatches, first, last, _sums_of_all_runs)


def run_table(problem: SchedulingProblem, runs: Sequence[tuple[int, int]]) -> StageTable:
    """Return the runs of layers first..last of one plan on every device type, shape (runs, T)."""
    first, last = np.array(runs).T
    return _stage_table(
        problem,
        num_microbatches_of(problem, len(runs)),
        first,
        last,
        lambda values: np.array([sum(values[begin : end + 1]) for begin, end in runs], dtype=np.float64),
    )


def _stage_table(
    problem: SchedulingProblem,
    num_microbatches: int,
    first: Ints,
    last: Ints,
    sums: Callable[[Sequence[float]], Floats],
) -> StageTable:
    """Return a table of runs; `sums` adds a value of each layer up over each run."""
    units = tuple(problem.device_types.values())
    terms = [step_terms(problem, unit, num_microbatches) for unit in units]
    shape = (last.size, len(units))
    compute_seconds, communication_seconds, boundaries, memory_replicas, rows_seconds, sum_seconds = (
        np.empty(shape) for _ in range(6)
    )
    replicated_bytes = sums([layer.state_bytes * (not layer.is_sharded) for layer in problem.layers])
    sharded_bytes = sums([layer.state_bytes * layer.is_sharded for layer in problem.layers])
    cut_bytes = np.array([0.0, *(layer.output_bytes_per_sample for layer in problem.layers[:-1]), 0.0])
    scale = problem.batch_size / problem.profile_batch_size
    is_trainers = problem.step_model is StepModel.TRAINER
    for index, (name, unit) in enumerate(problem.device_types.items()):
        work = sums([layer.compute_seconds[name] for layer in problem.layers])
        across = boundary_seconds(
            cut_bytes[first],
            cut_bytes[last + 1],
            profile_batch_size=problem.profile_batch_size,
            bandwidth_bytes_per_s=unit.bandwidth_bytes_per_s,
        )
        compute_seconds[:, index] = work * terms[index].compute_scale
        boundaries[:, index] = across * terms[index].boundary_scale
        memory_replicas[:, index] = least_memory_replicas(replicated_bytes, sharded_bytes, unit.usable_bytes)
        if is_trainers:
            communication_seconds[:, index] = boundaries[:, index]
            exchanged, summed = (
                sums(
                    [
                        layer.communication_seconds[name] * (layer.is_sharded is sharded)
                        for layer in problem.layers
                    ]
                )
                for sharded in (True, False)
            )
            rows_seconds[:, index] = exchanged * terms[index].communication_scale
            sum_seconds[:, index] = summed * scale
        else:
            traffic = sums([layer.communication_seconds[name] for layer in problem.layers])
            communication_seconds[:, index] = (traffic + across) * terms[index].communication_scale
    communication_fraction = np.array([each.communication_fraction for each in terms])
    trainer = None
    if is_trainers:
        trainer = TrainerTerms(
            fixed_seconds=rows_seconds * (1 - communication_fraction),
            shared_seconds=rows_seconds * communication_fraction,
            sum_seconds=sum_seconds,
            single_replica_communicates=problem.single_replica_communicates,
            microbatch_rows=problem.batch_size // num_microbatches,
        )
    covers = {index: _cover_prices(unit) for index, unit in enumerate(units) if unit.instances}
    has_lone_replicas = not is_trainers and not problem.single_replica_communicates
    return StageTable(
        compute_seconds=compute_seconds,
        communication_seconds=communication_seconds,
        trainer=trainer,
        single_communication_seconds=boundaries if has_lone_replicas else None,
        memory_replicas=memory_replicas,
        sweep=sweep_terms(problem, sums),
        compute_parallel_fraction=np.array([each.compute_fraction for each in terms]),
        communication_parallel_fraction=np.array([each.boundary_fraction for each in terms]),
        price_usd_per_hour=np.array([max(unit.price_usd_per_hour, LEAST_USD_PER_HOUR) for unit in units]),
        max_units=np.array([unit.max_units for unit in units], dtype=np.float64),
        interruptions_per_hour=objective_of(problem).interruptions_per_hour,
        type_indices=np.arange(len(units)),
        covers={index: prices for index, (prices, _) in covers.items()},
        on_demand_usd={
            index: extra
            for index, (_, extra) in covers.items()
            if units[index].on_demand_instances is not None
        },
    )


def _cover_prices(unit: UnitType) -> tuple[Floats, Floats]:
    """Return the prices of 0..max_units units, and what it adds that one instance is on-demand."""
    cover = InstanceCover.of(
        unit.instances, most_units=unit.max_units, on_demand=unit.on_demand_instances or ()
    )
    counts = range(unit.max_units + 1)
    prices = np.array([0.0, *map(cover.price_usd_per_hour, counts[1:])])
    added = np.array([0.0, *map(cover.steady_usd_per_hour, counts[1:])]) - prices
    return np.maximum(prices, LEAST_USD_PER_HOUR * np.array(counts)), added


def segment_row(first_layer: int, last_layer: int) -> int:
    """Return the row of a run of layers in `segment_table`."""
    return last_layer * (last_layer + 1) // 2 + first_layer


def segment_layers(row: int) -> tuple[int, int]:
    """Return first and last layer of a row of `segment_table`."""
    first_layer, last_layer = run_layers(np.array(row))
    return int(first_layer), int(last_layer)


def stages_of_rows(problem: SchedulingProblem, rows: Ints, num_replicas: Ints) -> tuple[Stage, ...]:
    """Return the stages with these flat indices run * T + type and replica counts, first stage first."""
    names = problem.device_type_names
    stages = [
        Stage(*segment_layers(row // len(names)), names[row % len(names)], int(count))
        for row, count in zip(rows.tolist(), num_replicas, strict=True)
    ]
    return tuple(sorted(stages, key=lambda stage: stage.first_layer))


def least_memory_replicas(replicated_bytes: Floats, sharded_bytes: Floats, memory_bytes: float) -> Floats:
    """Return the least k with replicated + sharded / k <= memory; infinite where none is enough."""
    limit_bytes = memory_bytes * (1 + COMPARISON_TOLERANCE)
    with np.errstate(divide="ignore", invalid="ignore"):
        replicas = np.maximum(np.ceil(sharded_bytes / (limit_bytes - replicated_bytes)), 1.0)
    replicas[sharded_bytes == 0] = 1.0
    replicas[replicated_bytes > limit_bytes] = np.inf
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
