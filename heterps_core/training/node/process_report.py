"""What a process of a run tells of itself at its good end: what it asked of the bucket, and how long it waited."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from statistics import fmean

from heterps_core.json_codec import from_json
from heterps_core.training.storage.run_directory import USAGE, RunDirectory
from heterps_core.training.storage.storage_usage import StorageUsage


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessReport:
    """One node or worker."""

    storage: StorageUsage = field(default_factory=StorageUsage)
    stage: int | None = None
    """Of a worker; None for a node's own process, which trains nothing."""

    trained_seconds: float = 0.0
    """By the clock, in its last attempt."""

    waited_seconds: float = 0.0
    """Of these, for messages of neighbouring stages."""


def write_process_report(run: RunDirectory, name: str, report: ProcessReport) -> None:
    """Leave a report in the run directory; `name` is the process's own."""
    run.write_json(f"{USAGE}/{name}.json", asdict(report))


def read_process_reports(run: RunDirectory) -> list[ProcessReport]:
    """Return the reports of all processes that came to a good end."""
    return [from_json(ProcessReport, run.require_json(f"{USAGE}/{name}")) for name in run.names(USAGE)]


def storage_of(reports: list[ProcessReport]) -> StorageUsage:
    """Return what all processes together asked of the bucket."""
    return sum((report.storage for report in reports), StorageUsage())


def idle_shares(reports: list[ProcessReport]) -> dict[int, float]:
    """Return by stage the mean share of its replicas' time, in [0, 1], in which they waited for other stages."""
    shares: dict[int, list[float]] = defaultdict(list)
    for report in reports:
        if report.stage is not None and report.trained_seconds > 0:
            shares[report.stage].append(min(report.waited_seconds / report.trained_seconds, 1.0))
    return {stage: fmean(values) for stage, values in sorted(shares.items())}
