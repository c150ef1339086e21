"""What a job is charged besides its machines' time: assumptions and list prices, each with its source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from heterps_core.device_types import get_device_type
from heterps_core.models.model_graph import ModelGraph
from heterps_core.planning.cost_model.step_model import FORWARD_SHARE
from heterps_core.planning.problem.extra_costs import ExtraCosts
from heterps_core.planning.problem.row_use import changed_share
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, UnitType, is_cpu
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.step_metrics import BUCKET_REPORT_INTERVAL_S
from heterps_core.training.storage.store import StorageUsage
from heterps_core.units import SECONDS_PER_HOUR
from infra.prices.service_charges import HOURS_PER_MONTH, RATES, Rates, service_lines

STARTUP_SECONDS = 70.0
"""From launch to a worker on a core that can load its tables: a request of a fleet and its answer (10 s, assumed), a
cold launch up to a shell (26 s: github.com/brevdev/ec2-coldboot-research), 0.65 GB of libraries that torch maps, read
from a volume that its snapshot still fills at 130 MB/s (5 s: repost.aws, article on EBS volume initialization during
MGN migrations), and two Pythons, code and sockets (29 s, assumed)."""

CARD_STARTUP_SECONDS = 40.0
"""By how much later a worker on a card can load: 2.5 GB more of libraries at that rate, and 20 s for driver and
context (both assumed)."""

TEARDOWN_SECONDS = 30.0
"""Assumed, from the last step to the end of billing, without the rows of the last checkpoint."""

DRAWN_BYTES_PER_S = 0.5e9
"""Initial rows that a core draws: 0.53e9 on one EPYC core (2026-11-28)."""

FLOW_BYTES_PER_S = 5e9 / 8
"""One flow outside a placement group (Amazon EC2 User Guide, instance network bandwidth)."""

LAST_SAMPLES = 6e7
"""Samples whose rows the last checkpoint writes: 100,000 a second, assumed, in the ten minutes before it."""

CHECKPOINT_SECONDS = 1.0
"""Assumed pause of all workers for one checkpoint: steps drain, and the rows that changed are copied, 256 MiB in some
0.4 s; what is written is written beside the training (docs/log, 2026-11-24)."""

CHECKPOINT_INTERVAL_SECONDS = 600.0
"""Between two checkpoints of a long run, at most."""

LEAST_CHECKPOINT_INTERVAL_SECONDS = 60.0
"""In which the store takes what changed."""

RESTART_SECONDS = STARTUP_SECONDS + 60.0
"""Assumed, from an interruption to the next step: a new machine starts as the first did, then all meet again
and share out the checkpoint, whose bytes are not counted."""

KEPT_WHOLE_CHECKPOINTS = 3
"""Two with whole rows of their own, and after each what changed: up to half as much again."""

OWN_HOUR_USD = 1e-6
"""Price of an hour in plans on machines that are not rented, so that the fastest of free plans is taken."""

BYTES_PER_GB = 1e9


REGION_BYTES_PER_S = FLOW_BYTES_PER_S
"""From a machine of fewer than 32 vCPUs to other regions (Amazon EC2 User Guide, instance network bandwidth); counted
as if one machine moved all bytes."""

REQUESTS_PER_REPORT = 2

BYTES_PER_WRITE = 10 * 1024**2

BYTES_PER_READ = 16 * 1024**2
"""As Arrow sends and the run directory asks for larger files, each part a request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """What crosses in a run between the region of its rows or its store and that of its machines."""

    usd: float = 0.0
    usd_per_hour: float = 0.0
    """Of checkpoints, each counted whole: what changed is less."""

    seconds_before: float = 0.0
    """For rows, and the model that the run begins with; all machines wait for them."""

    seconds_after: float = 0.0
    """For the last checkpoint, which holds the model."""

    text: str = ""


NO_CROSSING = Crossing()


def job_extra_costs(
    graph: ModelGraph,
    *,
    profiling_usd: float = 0.0,
    is_rented: bool = True,
    rates: Rates = RATES,
    crossing: Crossing = NO_CROSSING,
) -> ExtraCosts:
    """Return the extra costs of a job of this model.

    Spot risk is charged where device types are on spot; on-demand machines have none. Storage of rented ones is.
    """
    checkpoint_bytes = sum(layer.state_bytes for layer in graph.layers)
    stored_gb = KEPT_WHOLE_CHECKPOINTS * checkpoint_bytes / BYTES_PER_GB
    return ExtraCosts(
        startup_seconds=STARTUP_SECONDS + crossing.seconds_before,
        teardown_seconds=TEARDOWN_SECONDS + crossing.seconds_after,
        search_and_profiling_usd=profiling_usd,
        storage_usd_per_hour=stored_gb * rates["stored data"].usd_per_unit / HOURS_PER_MONTH
        + crossing.usd_per_hour
        if is_rented
        else OWN_HOUR_USD,
        crossing_usd=crossing.usd,
        checkpoint_seconds=CHECKPOINT_SECONDS,
        restart_seconds=RESTART_SECONDS,
    )


def fast_flow_text(problem: SchedulingProblem, stages: Sequence[Stage], samples_per_s: float) -> str:
    """Say that workers of adjacent stages would send more than EC2 lets a flow carry; empty where none would.

    Batches are cut where the replicas of either stage begin, so a flow has at most the part of one of the stage with
    more replicas. Plans count the bandwidth of machines, which several flows share.
    """
    flows = [
        samples_per_s
        * problem.layers[a.last_layer].output_bytes_per_sample
        / max(a.num_replicas, b.num_replicas)
        for a, b in pairwise(stages)
    ]
    if (fastest := max(flows, default=0.0)) <= FLOW_BYTES_PER_S:
        return ""
    needed = f"a flow between stages needs {fastest * 8e-9:.1f} Gbit/s"
    return f"{needed}, and EC2 gives one 5 outside a placement group: the night may take longer than planned"


def with_starts(
    problem: SchedulingProblem, graph: ModelGraph, *, starts_from_model: bool
) -> SchedulingProblem:
    """Return the problem with the start-up of each device type's machines, and what each byte of tables adds to it.

    A first model's rows are drawn, another's come from the bucket; the rows of the last checkpoint go there. Disks
    may be slower than either.
    """
    changed = changed_share(graph.layers, min(problem.num_samples * problem.num_epochs, LAST_SAMPLES))

    def started(name: str, unit: UnitType) -> UnitType:
        network = min(get_device_type(name).tensor_bandwidth_bytes_per_s, FLOW_BYTES_PER_S)
        loaded = network if starts_from_model else DRAWN_BYTES_PER_S
        disk = unit.disk_bytes_per_s or math.inf
        return replace(
            unit,
            startup_seconds=0.0 if is_cpu(name) else CARD_STARTUP_SECONDS,
            load_seconds_per_byte=1 / loaded + changed / network,
            disk_load_seconds_per_byte=1 / min(loaded, disk) + changed / min(network, disk),
        )

    units = {name: started(name, unit) for name, unit in problem.device_types.items()}
    return replace(problem, device_types=units)


def pause_share(evaluated_share: float) -> float:
    """Return what checkpoints and the evaluation after the last step add to the time of all steps, as a share.

    Args:
        evaluated_share: Rows that are evaluated over those that are trained in all epochs; they pass forward only.
    """
    return CHECKPOINT_SECONDS / CHECKPOINT_INTERVAL_SECONDS + FORWARD_SHARE * evaluated_share


def checkpoint_interval_seconds(interruptions_per_hour: float) -> float:
    """Return the time between two checkpoints with which pauses and repeated steps cost least, within bounds.

    sqrt(2 delta / lambda) for a pause delta and a rate lambda of interruptions (Young 1974).

    Example:
        >>> [round(checkpoint_interval_seconds(rate)) for rate in (0.0, 0.1, 10.0)]
        [600, 268, 60]
    """
    if not interruptions_per_hour:
        return CHECKPOINT_INTERVAL_SECONDS
    best = math.sqrt(2 * CHECKPOINT_SECONDS * SECONDS_PER_HOUR / interruptions_per_hour)
    return min(max(best, LEAST_CHECKPOINT_INTERVAL_SECONDS), CHECKPOINT_INTERVAL_SECONDS)


def _planned_usage(*, state_bytes: float, hours: float, leaves_region: bool) -> StorageUsage:
    """Return requests and egress of a run."""
    reports = REQUESTS_PER_REPORT * hours * SECONDS_PER_HOUR / BUCKET_REPORT_INTERVAL_S
    return StorageUsage(
        put_requests=round(reports + state_bytes / BYTES_PER_WRITE),
        get_requests=round(state_bytes / BYTES_PER_READ),
        egress_bytes=round(state_bytes) if leaves_region else 0,
    )


def planned_bucket_usd(
    *, state_bytes: float, hours: float, leaves_region: bool, rates: Rates = RATES
) -> float:
    """Return what requests and egress of a run will cost; see `_planned_usage`."""
    usage = _planned_usage(state_bytes=state_bytes, hours=hours, leaves_region=leaves_region)
    lines = service_lines(instance_seconds=0.0, disk_gb_each=0.0, storage=usage, rates=rates)
    return sum(line.usd for line in lines)
