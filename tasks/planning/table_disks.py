"""The same problem with a disk for each worker, so that tables need not lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heterps_core.hardware import InstanceOffer
from heterps_core.models.model_graph import ModelGraph
from heterps_core.planning.problem.row_use import cold_bytes_per_sample
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.provisioning.offer_choice import disk_bytes_per_s
from heterps_core.units import BYTES_PER_GIB, BYTES_PER_MIB
from infra.prices.service_charges import HOURS_PER_MONTH, RATES

HOT_SHARES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Of a table's rows in memory, of which a plan takes one for each stage."""

VOLUME_BYTES = 16_384 * BYTES_PER_GIB
VOLUME_BYTES_PER_S = 125.0 * BYTES_PER_MIB
"""The largest gp3 volume of EBS, and what each reads and writes without an extra charge (Amazon EBS User Guide,
General Purpose SSD volumes)."""


def disks_may_help(problem: SchedulingProblem) -> bool:
    """Tell whether some unit cannot hold all tables alone."""
    table_bytes = sum(layer.state_bytes for layer in problem.layers if layer.is_sharded)
    return any(unit.usable_bytes < table_bytes for unit in problem.device_types.values())


def with_table_disks(
    problem: SchedulingProblem, graph: ModelGraph, offers: Sequence[InstanceOffer], *, charges_storage: bool
) -> SchedulingProblem:
    """Return the problem with a volume for each unit; all tables together are charged while the run lasts."""
    table_bytes = sum(layer.state_bytes for layer in graph.layers if layer.is_sharded)
    usd_per_hour = table_bytes / 1e9 * RATES["disks"].usd_per_unit / HOURS_PER_MONTH * charges_storage
    extra = problem.extra_costs
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
            name: replace(
                unit,
                disk_bytes=VOLUME_BYTES,
                disk_bytes_per_s=min(
                    VOLUME_BYTES_PER_S, disk_bytes_per_s(name, offers) or VOLUME_BYTES_PER_S
                ),
            )
            for name, unit in problem.device_types.items()
        },
        extra_costs=replace(extra, storage_usd_per_hour=extra.storage_usd_per_hour + usd_per_hour),
    )
