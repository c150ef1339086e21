"""What a planned run will ask of its bucket, as the caps count it before anything is launched.

Rates of the trainer: a sign of life of each machine, a look at the lease, a report of the run; the model is written
once at least, and read by the flow's host when it is registered. What other checkpoints ask comes into the bill.
"""

from __future__ import annotations

from heterps_core.instance_metadata import is_in_the_cloud
from heterps_core.training.node_life import BUCKET_HEARTBEAT_INTERVAL_S
from heterps_core.training.step_metrics import BUCKET_REPORT_INTERVAL_S
from heterps_core.training.storage_usage import StorageUsage
from heterps_core.units import SECONDS_PER_HOUR
from infra.service_charges import service_lines

LEASE_LOOK_INTERVAL_S = 60.0
REQUESTS_PER_LOOK = 2
REQUESTS_PER_REPORT = 2
BYTES_PER_WRITE = 10 * 1024**2
BYTES_PER_READ = 16 * 1024**2
"""As Arrow sends and the run directory asks for larger files, each part a request."""


def planned_usage(
    *, state_bytes: float, num_machines: int, hours: float, leaves_region: bool
) -> StorageUsage:
    """Return requests and egress of a run.

    Args:
        state_bytes: Of the model with its optimizers' state.
        num_machines: That look and show signs of life.
        hours: Of the run.
        leaves_region: The flow's host is outside the bucket's region.
    """
    seconds = hours * SECONDS_PER_HOUR
    signs = num_machines * seconds / BUCKET_HEARTBEAT_INTERVAL_S
    reports = REQUESTS_PER_REPORT * seconds / BUCKET_REPORT_INTERVAL_S
    looks = REQUESTS_PER_LOOK * num_machines * seconds / LEASE_LOOK_INTERVAL_S
    return StorageUsage(
        put_requests=round(signs + reports + state_bytes / BYTES_PER_WRITE),
        get_requests=round(looks + state_bytes / BYTES_PER_READ),
        egress_bytes=round(state_bytes) if leaves_region else 0,
    )


def planned_bucket_usd(*, state_bytes: float, num_machines: int, hours: float) -> float:
    """Return what requests and egress of a run will cost; see `planned_usage`."""
    usage = planned_usage(
        state_bytes=state_bytes,
        num_machines=num_machines,
        hours=hours,
        leaves_region=not is_in_the_cloud(),
    )
    lines = service_lines(instance_seconds=0.0, disk_gb_each=0.0, storage=usage)
    return sum(line.usd for line in lines)
