"""What a planned run will ask of its bucket besides what each machine does, as the caps count it from the start.

The flow's host writes and reads a report of the run; the model is written once at least, and read by that host when
it is registered. Heartbeats and lease looks are in the price of a machine, `infra.prices.service_charges`; what other
checkpoints ask comes into the bill.
"""

from __future__ import annotations

from heterps_core.training.step_metrics import BUCKET_REPORT_INTERVAL_S
from heterps_core.training.storage.store import StorageUsage
from heterps_core.units import SECONDS_PER_HOUR
from infra.prices.service_charges import service_lines

REQUESTS_PER_REPORT = 2
BYTES_PER_WRITE = 10 * 1024**2
BYTES_PER_READ = 16 * 1024**2
"""As Arrow sends and the run directory asks for larger files, each part a request."""


def planned_usage(*, state_bytes: float, hours: float, leaves_region: bool) -> StorageUsage:
    """Return requests and egress of a run.

    Args:
        state_bytes: Of the model with its optimizers' state.
        hours: Of the run.
        leaves_region: The flow's host is outside the bucket's region.
    """
    reports = REQUESTS_PER_REPORT * hours * SECONDS_PER_HOUR / BUCKET_REPORT_INTERVAL_S
    return StorageUsage(
        put_requests=round(reports + state_bytes / BYTES_PER_WRITE),
        get_requests=round(state_bytes / BYTES_PER_READ),
        egress_bytes=round(state_bytes) if leaves_region else 0,
    )


def planned_bucket_usd(*, state_bytes: float, hours: float, leaves_region: bool) -> float:
    """Return what requests and egress of a run will cost; see `planned_usage`."""
    usage = planned_usage(state_bytes=state_bytes, hours=hours, leaves_region=leaves_region)
    lines = service_lines(instance_seconds=0.0, disk_gb_each=0.0, storage=usage)
    return sum(line.usd for line in lines)
