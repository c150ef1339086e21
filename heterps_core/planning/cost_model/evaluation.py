"""What a plan costs and why: time, memory and price per stage, totals, and every broken constraint.

Searches rate plans in bulk by the same tables (`run_tables.py`); every reported figure comes from here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from heterps_core.errors import ConfigurationError
from heterps_core.planning.cost_model.disk_sweep import Sweep
from heterps_core.planning.cost_model.instance_cover import InstanceCover
from heterps_core.planning.cost_model.mixed_stage import PlanParts
from heterps_core.planning.cost_model.stage_cost import is_within, replica_memory_bytes
from heterps_core.planning.cost_model.step_model import num_microbatches_of
from heterps_core.planning.problem.scheduling_problem import (
    SchedulingProblem,
    StepModel,
    UnitType,
    is_cpu,
)
from heterps_core.planning.simulate.pipeline_load import pipeline_load
from heterps_core.planning.simulate.pipeline_simulation import simulate
from heterps_core.plans.scheduling_plan import Stage, check_stages_cover_chain
from heterps_core.units import SECONDS_PER_HOUR


@dataclass(frozen=True, kw_only=True, slots=True)
class StageEvaluation:
    """One stage of a plan, with its share of everything."""

    stage: Stage
    compute_seconds: float
    """CT, for one training batch."""

    communication_seconds: float
    """In-stage and across both boundaries, for one training batch."""

    exchange_seconds: float
    """The part of it in which a worker cannot compute; 0 in the papers' model of a step."""

    memory_bytes: float
    """State on one replica; with a sweep what of it memory holds, windows included."""

    price_usd_per_hour: float
    """Of its machines and of disks that are bought for it."""

    second_usd_per_hour: float = 0.0
    """The part of it for machines of the second device type."""

    drained_seconds: float = 0.0
    """DT, the least time of a step that fills and drains around this stage; 0 where updates are delayed."""

    rows: tuple[int, ...] = ()
    """Of a micro-batch, those of each replica of both device types; the slower of these has the times above."""

    microbatch_rows: int = 0

    reading_seconds: float = 0.0
    """IT, the time of the core that reads the rows beside a card."""

    sweep: Sweep | None = None
    """None where memory holds all rows, or where disks do not help either."""

    reserved_usd_per_hour: float = 0.0
    """What reserved machines save."""

    fewest_replicas: float = 1.0
    """Least replicas whose memory and disks hold the stage; infinite where none do."""

    start_seconds: float = 0.0
    """What it takes in a run, over the common start-up, to be ready and to write its tables at the end."""

    @property
    def usd_per_hour_by_type(self) -> dict[str, float]:
        """Device type -> its part of the price."""
        first = self.price_usd_per_hour - self.second_usd_per_hour
        return dict(zip(self.stage.replicas_by_type, (first, self.second_usd_per_hour), strict=False))

    @property
    def with_shares(self) -> Stage:
        """The stage with the shares of its replicas, where it has two device types: whole rows of a micro-batch."""
        if not self.rows:
            return self.stage
        (first, second), all_rows = self.stage.replicas_by_type.values(), self.microbatch_rows
        shares = [self.rows[0]] * first + [self.rows[1]] * second
        while sum(shares) > all_rows:
            shares[len(shares) - 1 - shares[::-1].index(max(shares))] -= 1
        return replace(self.stage, shares=tuple(shares))

    @property
    def seconds(self) -> float:
        """ET, see `step_model.py`: what is left of communication overlaps with computing, and so does a sweep."""
        beside = max(self.compute_seconds + self.exchange_seconds, self.communication_seconds)
        in_memory = max(beside, self.drained_seconds, self.reading_seconds)
        return in_memory if self.sweep is None else max(in_memory, self.sweep.seconds)

    @property
    def is_limited_by_reading(self) -> bool:
        """The core that reads the rows beside a card takes longer than all else."""
        return self.reading_seconds > 0 and self.reading_seconds == self.seconds


class CostLine(NamedTuple):
    """One line of the predicted bill."""

    name: str
    cost_usd: float


@dataclass(frozen=True, slots=True)
class Violation:
    """A constraint that a plan breaks, and by how far."""

    constraint: str
    """ "throughput floor", "memory", "units cap" or "on-demand machine"."""

    subject: str
    required: float
    reached: float
    unit: str

    def __str__(self) -> str:
        return (
            f"{self.constraint} of {self.subject}: {self.reached:.6g} {self.unit} "
            f"against a limit of {self.required:.6g}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanEvaluation:
    """A plan's cost as a breakdown."""

    stages: tuple[StageEvaluation, ...]
    throughput_samples_per_s: float
    price_usd_per_hour: float
    run_seconds: float
    """ETT: wall time of all epochs with checkpoints and evaluation, without start-up, teardown and interruptions."""

    interruptions_per_hour: float
    """Expected of all units together; each stops the whole plan."""

    num_microbatches: int
    """Micro-batches of the trainer's step; 1 in the papers' model, which has none."""

    cost_lines: tuple[CostLine, ...]
    """What the run is charged for, a line for each cost; those that are switched off are 0."""

    violations: tuple[Violation, ...]

    @property
    def cost_usd(self) -> float:
        """The sum of all lines."""
        return sum(line.cost_usd for line in self.cost_lines)

    @property
    def start_seconds(self) -> float:
        """What start-up and teardown take over the problem's own, for all machines."""
        return max(part.start_seconds for part in self.stages)

    @property
    def sweeps(self) -> Mapping[int, Sweep]:
        """Index of a stage -> how it keeps rows on disk, of those that do."""
        return {index: part.sweep for index, part in enumerate(self.stages) if part.sweep is not None}

    @property
    def bottleneck(self) -> StageEvaluation:
        """The slowest stage, which sets the throughput."""
        return max(self.stages, key=lambda stage: stage.seconds)


def evaluate(
    problem: SchedulingProblem, stages: Sequence[Stage], *, num_microbatches: int | None = None
) -> PlanEvaluation:
    """Return time, memory, price and constraint violations of a plan.

    With ET(k) of each stage as in `step_model.py`, throughput = B / max ET, and
    cost = E * M / throughput / 3600 * sum of price * k, with the lines of `extra_costs` besides. The trainer's step
    is simulated, as stages may wait for one another (`pipeline_simulation.py`), by default with as many micro-batches
    as the trainer takes.

    Raises:
        ConfigurationError: The stages do not cover the chain, name an unknown device type, or two
            neighbouring stages share one in the papers' model.
    """
    check_stages_cover_chain(stages, problem.num_layers)
    for left, right in pairwise(stages):
        if problem.neighbours_differ and left.device_type == right.device_type:
            raise ConfigurationError(
                f"by the papers' step neighbouring stages must differ in device type, but layers "
                f"{left.first_layer}..{left.last_layer} and {right.first_layer}..{right.last_layer} are both on "
                f"{left.device_type!r}; join them"
            )
    num_microbatches = num_microbatches or num_microbatches_of(problem, len(stages))
    parts = _evaluate_stages(problem, stages, num_microbatches=num_microbatches)
    # Where all stages are on spot, one of them has a machine on-demand: the stage for which that adds least.
    added_usd = {
        (index, part.device_type): _on_demand_usd_per_hour(problem, part)
        for index, stage in enumerate(stages)
        for part in stage.parts
    }
    steady, name = min(added_usd, key=added_usd.__getitem__)
    on_demand_usd = added if math.isfinite(added := added_usd[steady, name]) else 0.0
    part = parts[steady]
    parts[steady] = replace(
        part,
        price_usd_per_hour=part.price_usd_per_hour + on_demand_usd,
        second_usd_per_hour=part.second_usd_per_hour
        + on_demand_usd * (name == part.stage.second_device_type),
    )
    slowest_seconds = max(part.seconds for part in parts)
    if problem.step_model is StepModel.TRAINER and (problem.drains or len(stages) > 1):
        load = pipeline_load(problem, stages, num_microbatches=num_microbatches)
        slowest_seconds = max(slowest_seconds, simulate(load).step_seconds)
    throughput_samples_per_s = problem.batch_size / slowest_seconds
    run_seconds = problem.run_seconds(slowest_seconds)
    return PlanEvaluation(
        stages=tuple(parts),
        throughput_samples_per_s=throughput_samples_per_s,
        price_usd_per_hour=sum(part.price_usd_per_hour for part in parts),
        run_seconds=run_seconds,
        interruptions_per_hour=(interruptions_per_hour := _interruptions_per_hour(problem, stages)),
        num_microbatches=num_microbatches,
        cost_lines=_cost_lines(problem, parts, run_seconds, interruptions_per_hour, on_demand_usd),
        violations=tuple(_violations(problem, parts, slowest_seconds, num_microbatches)),
    )


def _interruptions_per_hour(problem: SchedulingProblem, stages: Sequence[Stage]) -> float:
    return sum(
        problem.device_types[part.device_type].interruptions_per_hour * part.num_replicas
        for stage in stages
        for part in stage.parts
    )


def _cost_lines(
    problem: SchedulingProblem,
    parts: Sequence[StageEvaluation],
    run_seconds: float,
    interruptions_per_hour: float,
    on_demand_usd_per_hour: float,
) -> tuple[CostLine, ...]:
    """Return the bill; the lines add up to the objective of `objective.py`."""
    extra = problem.extra_costs
    run_hours = run_seconds / SECONDS_PER_HOUR
    later_seconds = max(part.start_seconds for part in parts)
    overhead_hours = (extra.startup_seconds + extra.teardown_seconds + later_seconds) / SECONDS_PER_HOUR
    disks_usd = sum(part.sweep.usd_per_hour for part in parts if part.sweep is not None)
    price = extra.machine_usd_per_hour + sum(part.price_usd_per_hour for part in parts)
    unit_price = extra.machine_usd_per_hour
    unit_price += sum(
        problem.device_types[name].price_usd_per_hour * count
        for part in parts
        for name, count in part.stage.replicas_by_type.items()
    )
    reserved_usd = sum(part.reserved_usd_per_hour for part in parts)
    whole_usd = price + reserved_usd - on_demand_usd_per_hour - unit_price - disks_usd
    storage_usd = (run_hours + overhead_hours) * extra.storage_usd_per_hour
    lost_share = (
        math.sqrt(2 * extra.checkpoint_seconds / SECONDS_PER_HOUR * interruptions_per_hour)
        + extra.restart_seconds / SECONDS_PER_HOUR * interruptions_per_hour
    )
    return (
        CostLine("compute", run_hours * unit_price),
        CostLine("whole instances", run_hours * whole_usd),
        CostLine("reserved machines", -run_hours * reserved_usd),
        CostLine("disks for tables", run_hours * disks_usd),
        CostLine("one machine on-demand", run_hours * on_demand_usd_per_hour),
        CostLine("start-up and teardown", overhead_hours * price),
        CostLine("storage", storage_usd),
        CostLine("transfer between regions", extra.crossing_usd),
        CostLine("spot risk", run_hours * lost_share * (price + extra.storage_usd_per_hour)),
        CostLine("search and profiling", extra.search_and_profiling_usd),
    )


def _evaluate_stages(
    problem: SchedulingProblem, stages: Sequence[Stage], *, num_microbatches: int
) -> list[StageEvaluation]:
    """Return time, memory and price of each stage.

    Raises:
        ConfigurationError: The problem has no such device type, or stages of one alone.
    """
    for stage in stages:
        for name in stage.replicas_by_type:
            if name not in problem.device_types:
                known = ", ".join(problem.device_types)
                raise ConfigurationError(f"unknown device type {name!r} in a plan; known are: {known}")
        kinds = set(map(is_cpu, stage.replicas_by_type))
        if len(kinds) > 1 or (stage.second_device_type and not problem.mixes_device_types):
            raise ConfigurationError(
                f"the device types of a stage must be CPUs, or cards, and two need mixes_device_types in the "
                f"problem, got {stage.units} for layers {stage.first_layer}..{stage.last_layer}; plan again"
            )
    of_types = PlanParts.of(problem, stages, num_microbatches=num_microbatches)
    table, is_shared = of_types.table, of_types.in_stage > 0
    fewest_replicas, replicas = table.fewest_replicas, of_types.replicas
    in_all = np.maximum(of_types.in_stage, replicas)
    starts = table.start_seconds(in_all) * problem.num_steps * (1 + problem.pause_share)
    [shares] = table.reserved.shares(table.type_indices, replicas[None]).tolist()
    # Replicas of two device types keep no rows of tables on disk.
    table, sweeps = table.sweeping(np.where(is_shared, np.inf, replicas), problem.hot_shares)
    terms = of_types.terms(table, table.pacing(replicas))
    seconds = np.stack(np.broadcast_arrays(*terms), axis=1)
    units = [problem.device_types[part.device_type] for part in of_types.parts]
    full_prices = [
        _price_usd_per_hour(*each) for each in zip(units, replicas.astype(int).tolist(), strict=True)
    ]
    prices = [
        _price_usd_per_hour(unit, part.num_replicas, reserved=share)
        for unit, part, share in zip(units, of_types.parts, shares, strict=True)
    ]
    evaluated = []
    for stage, span, slowest in zip(stages, of_types.spans, of_types.slowest(terms.total), strict=True):
        compute, exchange, across, gradient_sum, drained, reading = seconds[slowest].tolist()
        sweep = sweeps[slowest]
        bought = sum(prices[span])
        evaluated.append(
            StageEvaluation(
                stage=stage,
                compute_seconds=compute,
                communication_seconds=exchange + across + gradient_sum,
                exchange_seconds=exchange,
                drained_seconds=drained,
                rows=tuple(of_types.rows[span].tolist()) if is_shared[slowest] else (),
                microbatch_rows=problem.batch_size // num_microbatches,
                reading_seconds=reading,
                memory_bytes=_memory_bytes(problem, stage, sweep),
                price_usd_per_hour=bought + (0.0 if sweep is None else sweep.usd_per_hour),
                second_usd_per_hour=sum(prices[span][1:]),
                reserved_usd_per_hour=sum(full_prices[span]) - bought,
                sweep=sweep and sweep._replace(disk_name=units[slowest].disk_name),
                fewest_replicas=float(fewest_replicas[span].max()),
                start_seconds=float(starts[span].max()),
            )
        )
    return evaluated


def _memory_bytes(problem: SchedulingProblem, stage: Stage, sweep: Sweep | None) -> float:
    """Return the state of one replica, all of the memory that it may fill where it sweeps."""
    if sweep is not None:
        return problem.device_types[stage.device_type].usable_bytes
    layers = problem.layers[stage.first_layer : stage.last_layer + 1]
    return float(
        replica_memory_bytes(
            sum(layer.state_bytes for layer in layers if not layer.is_sharded),
            sum(layer.state_bytes for layer in layers if layer.is_sharded),
            stage.num_replicas,
        )
    )


def _price_usd_per_hour(unit: UnitType, num_replicas: int, *, reserved: int = 0) -> float:
    if unit.reserved is not None:
        num_replicas = max(0, num_replicas - reserved * unit.reserved.units)
    if not unit.instances or num_replicas == 0:
        return unit.price_usd_per_hour * num_replicas
    return _cover(unit, num_replicas).price_usd_per_hour(num_replicas)


def _on_demand_usd_per_hour(problem: SchedulingProblem, stage: Stage) -> float:
    """Return what it adds that one machine of a stage is on-demand; infinite where none is sold so."""
    unit = problem.device_types[stage.device_type]
    if unit.on_demand_instances is None or unit.reserved is not None:
        return 0.0
    cover = _cover(unit, stage.num_replicas)
    return cover.steady_usd_per_hour(stage.num_replicas) - cover.price_usd_per_hour(stage.num_replicas)


def _cover(unit: UnitType, num_replicas: int) -> InstanceCover:
    return InstanceCover.of(unit.instances, most_units=num_replicas, on_demand=unit.on_demand_instances or ())


def _violations(
    problem: SchedulingProblem,
    parts: Sequence[StageEvaluation],
    slowest_seconds: float,
    num_microbatches: int,
) -> Iterator[Violation]:
    """Yield broken constraints: the floor, memory of stages, units of types, an on-demand machine, micro-batches."""
    if not is_within(slowest_seconds, problem.stage_seconds_limit):
        floor = problem.throughput_floor_samples_per_s
        reached = problem.batch_size / slowest_seconds
        yield Violation("throughput floor", "the pipeline", floor, reached, "samples/s")
    used = dict.fromkeys(problem.device_types, 0)
    for part in parts:
        for name, count in part.stage.replicas_by_type.items():
            unit = problem.device_types[name]
            used[name] += -(-count // unit.machine_units) * unit.machine_units
            if not is_within(part.memory_bytes, limit := unit.usable_bytes):
                where = f"layers {part.stage.first_layer}..{part.stage.last_layer} on {name}"
                yield Violation("memory", where, limit, part.memory_bytes, "bytes")
    for name, num_units in used.items():
        if num_units > problem.device_types[name].max_units:
            yield Violation("units cap", name, problem.device_types[name].max_units, num_units, "units")
    names = {name for part in parts for name in part.stage.replicas_by_type}
    if all(problem.device_types[name].is_all_on_spot for name in names):
        yield Violation("on-demand machine", "the plan", 1, 0, "machines")
    num_rows = problem.batch_size // num_microbatches
    for stage in (part.stage for part in parts if problem.step_model is StepModel.TRAINER):
        if stage.num_replicas > num_rows:
            what = f"layers {stage.first_layer}..{stage.last_layer}, which wants a row for each replica"
            yield Violation("micro-batch", what, num_rows, stage.num_replicas, "replicas")
