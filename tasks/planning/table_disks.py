"""Disks for tables that memory does not hold: those that a problem counts on, and the volumes that a launch buys."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from heterps_core.data.dataset import PreparedDataset
from heterps_core.device_types import get_device_type
from heterps_core.embeddings.swept.sweep_memory import MOST_BATCHES, memory_of_batches
from heterps_core.hardware import InstanceOffer
from heterps_core.models.model_graph import ModelGraph
from heterps_core.planning.cost_model.evaluation import PlanEvaluation
from heterps_core.planning.problem.extra_costs import InstanceSize
from heterps_core.planning.problem.row_use import cold_bytes_per_sample
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, UnitType, is_cpu
from heterps_core.planning.provisioning.offer_choice import disk_bytes_per_s
from heterps_core.plans.provisioning_plan import ProvisioningPlan, TableDisk
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.units import BYTES_PER_GIB, BYTES_PER_MIB
from infra.prices.service_charges import (
    INCLUDED_MIB_PER_S,
    MOST_MIB_PER_S,
    RATES,
    Rates,
    table_disk_usd_per_hour,
)

if TYPE_CHECKING:
    from heterps_core.data.batch import ClickBatch

HOT_SHARES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Shares of a table's rows in memory, of which a plan takes one for each stage."""

OWN_DISK, VOLUME = "own disk", "EBS volume"
"""Names of disks in plans: an instance store, and a gp3 volume, which is bought."""

VOLUME_BYTES = 16_384 * BYTES_PER_GIB
"""The largest gp3 volume of EBS (Amazon EBS User Guide, General Purpose SSD volumes)."""

SWEEP_SECONDS_PER_BYTE = 1.75e-8
"""Processor time of a core for each byte of rows that come from disk: it copies them in and out, lists them and keeps
batches until their rows are there; 1.35e-8 to 1.74e-8 on idle cores of two machines (docs/log/2026-11.md)."""

FREE_MEMORY_SHARE = 0.05
"""Free share of a unit's memory, besides what is reserved: a sweep fills what it is given, and a machine has some
hundredths less than it is sold with. A worker was seen to take 40 MB more than was counted."""

FREE_SHARE = 0.02
"""Free share of a disk, for its file system."""


class ReplicaDisk(NamedTuple):
    """Room and speed that a replica needs on the volume of its instance."""

    device_type: str
    table_bytes: float
    bytes_per_s: float
    """Read or written."""


NO_DISKS: Mapping[int, ReplicaDisk] = {}


def with_table_disks(
    problem: SchedulingProblem, graph: ModelGraph, offers: Sequence[InstanceOffer], rates: Rates = RATES
) -> SchedulingProblem:
    """Return the problem with a disk at every core, where some unit cannot hold all tables.

    Cards have none: their tables lie in their own memory. A core has its share of its instance's own disks where
    their speed is known, else of a volume that is bought at the region's rates.
    """
    table_bytes = sum(layer.state_bytes for layer in graph.layers if layer.is_sharded)
    if all(unit.usable_bytes >= table_bytes for unit in problem.device_types.values()):
        return problem
    return replace(
        problem,
        hot_shares=HOT_SHARES,
        layers=tuple(
            replace(
                costs,
                cold_bytes_per_sample=tuple(cold_bytes_per_sample(layer, share) for share in HOT_SHARES),
            )
            if layer.is_sharded
            else costs
            for costs, layer in zip(problem.layers, graph.layers, strict=True)
        ),
        device_types={
            name: _with_disk(name, unit, offers, rates) if is_cpu(name) else unit
            for name, unit in problem.device_types.items()
        },
    )


def _with_disk(name: str, unit: UnitType, offers: Sequence[InstanceOffer], rates: Rates) -> UnitType:
    hardware = get_device_type(name)
    if not hardware.local_disk_bytes_per_s:
        return _with_volume(unit, disk_bytes_per_s(name, offers), rates)
    return _sweeping(
        unit,
        name=OWN_DISK,
        disk_bytes=hardware.local_disk_bytes / (1 + FREE_SHARE),
        bytes_per_s=hardware.local_disk_bytes_per_s,
    )


def _with_volume(unit: UnitType, share_bytes_per_s: float, rates: Rates) -> UnitType:
    """Return a unit with a volume as fast as its share of what its instance moves, where that is known.

    The share is that of the family's largest size, which smaller ones keep up all day; their own figures are
    bursts of half an hour (Amazon EC2 User Guide, EBS-optimized instances). The unit is sold in instances whose units
    all have their part of one volume's throughput; its price is that of the largest of the cheapest ones, as smaller
    ones have a larger part of what a volume includes.
    """
    bytes_per_s = float(BYTES_PER_MIB * INCLUDED_MIB_PER_S)
    if share_bytes_per_s:
        bytes_per_s = min(share_bytes_per_s, float(BYTES_PER_MIB * MOST_MIB_PER_S))
    most_units = _most_units(bytes_per_s)
    small = tuple(size for size in unit.instances if size.units <= most_units)
    if unit.instances and not small:
        return unit
    one_unit = InstanceSize(name="a unit", units=1, price_usd_per_hour=unit.price_usd_per_hour)
    sold = min(small or [one_unit], key=lambda size: (size.price_usd_per_hour / size.units, -size.units))
    mib_per_s = math.ceil(sold.units * bytes_per_s / BYTES_PER_MIB)
    price = partial(table_disk_usd_per_hour, rates=rates)
    unit = replace(
        unit,
        disk_usd_per_hour=price(gigabytes=0, mib_per_s=mib_per_s) / sold.units,
        disk_usd_per_gb_hour=price(gigabytes=1 + FREE_SHARE, mib_per_s=INCLUDED_MIB_PER_S),
        instances=small,
        on_demand_instances=unit.on_demand_instances
        and tuple(size for size in unit.on_demand_instances if size.units <= most_units),
        reserved=unit.reserved if unit.reserved and unit.reserved.units <= most_units else None,
        price_usd_per_hour=sold.price_usd_per_hour / sold.units,
    )
    return _sweeping(unit, name=VOLUME, disk_bytes=VOLUME_BYTES, bytes_per_s=bytes_per_s)


def _sweeping(unit: UnitType, *, name: str, disk_bytes: float, bytes_per_s: float) -> UnitType:
    return replace(
        unit,
        reserved_bytes=unit.reserved_bytes + FREE_MEMORY_SHARE * unit.memory_bytes,
        disk_name=name,
        disk_bytes=disk_bytes,
        disk_bytes_per_s=bytes_per_s,
        sweep_seconds_per_byte=SWEEP_SECONDS_PER_BYTE,
    )


def _most_units(bytes_per_s: float) -> int:
    """Return how many units may share a volume that gives each of them so much."""
    return math.floor(MOST_MIB_PER_S * BYTES_PER_MIB / bytes_per_s)


def replica_disks(problem: SchedulingProblem, evaluation: PlanEvaluation) -> dict[int, ReplicaDisk]:
    """Return the part of a volume that a replica needs, for each stage with rows on volumes."""
    return {
        index: ReplicaDisk(
            device_type=(name := evaluation.stages[index].stage.device_type),
            table_bytes=sweep.disk_bytes,
            bytes_per_s=problem.device_types[name].disk_bytes_per_s,
        )
        for index, sweep in evaluation.sweeps.items()
        if sweep.disk_name != OWN_DISK
    }


def table_memory_bytes(problem: SchedulingProblem, evaluation: PlanEvaluation) -> int | None:
    """Return what a worker may fill with rows of tables in the plan's stages that keep others on disk.

    None where no stage does; the least where several do.
    """
    return min(
        (
            math.floor(
                problem.device_types[part.stage.device_type].usable_bytes
                - sum(
                    layer.state_bytes
                    for layer in problem.layers[part.stage.first_layer : part.stage.last_layer + 1]
                    if not layer.is_sharded
                )
            )
            for part in evaluation.stages
            if part.sweep is not None
        ),
        default=None,
    )


def dry_run_table_memory_bytes(
    memory_bytes: int,
    planned: tuple[ModelGraph, Sequence[Stage]],
    *,
    dataset: PreparedDataset,
    model: str,
    stages: Sequence[Stage],
    embedding_optimizer: str,
    batch_size: int,
    seed: int,
) -> int:
    """Return what a worker of a dry run may fill with rows, so that the plan's share of them is in memory.

    The buffers of a sweep come beside it, as they count for nothing in a large table. A worker has at least what all
    rows of the first ten batches take, trained or held out, where `MOST_BATCHES` must fit. They are counted for one
    replica, as machines may be lost. Tables that are no larger are in memory.

    Args:
        memory_bytes: Of a worker of the plan.
        planned: Model and stages of the plan.
        dataset: That the dry run trains.
        stages: Of the dry run.
    """
    # To load torch takes longer than to check a run's parameters, which need the disks of this file.
    from heterps_core.embeddings.row_optimizers import get_row_optimizer
    from heterps_core.models.chain import build_chain
    from heterps_core.models.slot_embedding import SlotEmbedding

    graph, planned_stages = planned
    share = memory_bytes / max(
        sum(layer.state_bytes for layer in graph.layers[_layers_of(stage)] if layer.is_sharded)
        / stage.num_replicas
        for stage in planned_stages
    )
    layers = list(build_chain(model, dataset.features, seed=0).children())
    first = _first_batches(dataset, batch_size=batch_size, seed=seed)
    needs = []
    for stage in stages:
        embeddings = [layer for layer in layers[_layers_of(stage)] if isinstance(layer, SlotEmbedding)]
        wholes, shards = (
            [
                layer.shard_size(
                    get_row_optimizer(embedding_optimizer),
                    batch_size=batch_size,
                    num_shards=num_shards,
                    shard=0,
                )
                for layer in embeddings
            ]
            for num_shards in (1, stage.num_replicas)
        )
        num_batches = max(
            (
                Fraction(np.unique(layer.row_numbers(batch).numpy()).size, whole.most_rows)
                for batch in first
                for layer, whole in zip(embeddings, wholes, strict=True)
            ),
            default=0,
        )
        shared = sum(math.ceil(share * shard.whole_bytes) + shard.buffer_bytes for shard in shards)
        needs.append(max(shared, memory_of_batches(wholes, num_batches)))
    return max(needs)


def _first_batches(dataset: PreparedDataset, *, batch_size: int, seed: int) -> list[ClickBatch]:
    """Return the rows of the first ten batches that are trained, and of those that are held out."""
    num_first = MOST_BATCHES + 2
    rows = [dataset.held_out_rows(index, batch_size=batch_size) for index in range(num_first)]
    if dataset.num_batches(batch_size) <= num_first:
        # Another epoch leaves others out of its batches.
        trained = np.arange(dataset.num_train_rows)
    else:
        trained = np.concatenate(
            [dataset.batch_rows(0, index, batch_size=batch_size, seed=seed) for index in range(num_first)]
        )
    return [dataset.batch(trained), dataset.batch(np.concatenate(rows))]


def _layers_of(stage: Stage) -> slice:
    return slice(stage.first_layer, stage.last_layer + 1)


def offers_with_disks(
    offers: Sequence[InstanceOffer], disks: Iterable[ReplicaDisk]
) -> tuple[InstanceOffer, ...]:
    """Return the offers whose units all have their part of one volume's throughput, as `with_table_disks` plans."""
    cores = [(get_device_type(disk.device_type), _most_units(disk.bytes_per_s)) for disk in disks]
    return tuple(
        offer
        for offer in offers
        if all(core.equal_units_of(offer.instance_type) <= most_units for core, most_units in cores)
    )


def with_table_disk(
    plan: ProvisioningPlan, disks: Mapping[int, ReplicaDisk], *, rates: Rates = RATES
) -> ProvisioningPlan:
    """Return a purchase whose instances have room and throughput for the rows that replicas keep on disk.

    Args:
        disks: By stage.
        rates: Prices of services in the region.
    """
    groups = [
        replace(group, table_disk=_table_disk(group.units_per_instance, disks[group.stage], rates))
        if group.stage in disks
        else group
        for group in plan.groups
    ]
    return replace(plan, groups=tuple(groups))


def _table_disk(units: int, disk: ReplicaDisk, rates: Rates) -> TableDisk:
    gigabytes = math.ceil((1 + FREE_SHARE) * units * disk.table_bytes / 1e9)
    mib_per_s = max(math.ceil(units * disk.bytes_per_s / BYTES_PER_MIB), INCLUDED_MIB_PER_S)
    price = table_disk_usd_per_hour(gigabytes=gigabytes, mib_per_s=mib_per_s, rates=rates)
    return TableDisk(gigabytes=gigabytes, mib_per_s=mib_per_s, usd_per_hour=price)
