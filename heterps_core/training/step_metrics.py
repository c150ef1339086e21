"""Files in which a run reports its steps while it trains, and each process its usage at its good end."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from statistics import fmean

from heterps_core.embeddings.swept.sweep_memory import SweepCounts
from heterps_core.json_codec import from_json
from heterps_core.training.storage.run_directory import PROGRESS, STEPS, USAGE, RunDirectory
from heterps_core.training.storage.store import StorageUsage

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.5
BUCKET_REPORT_INTERVAL_S = 5.0
"""Each report is two requests that are paid for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One training step."""

    step: int
    """Counted from 1 over all epochs."""

    epoch: int
    num_samples: int
    loss: float
    """Mean log-loss of the batch before its update."""

    elapsed_s: float
    """From the start of training (of this attempt) to the end of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run is right now."""

    phase: str
    """"training", "evaluating", or "stopped" where a stop was asked for."""

    step: int
    num_steps: int
    num_samples: int
    """Trained in this attempt."""

    loss: float
    elapsed_s: float
    attempt: int
    """0 at first; one more after each restart of the workers."""


class MetricWriter:
    """Collects the steps of one process and writes them about twice a second, into a bucket every five.

    Args:
        attempt: How often the workers were restarted before.
    """

    def __init__(self, run: RunDirectory, *, num_steps: int, attempt: int) -> None:
        self._run = run
        self._num_steps = num_steps
        self._attempt = attempt
        self._pending: list[StepMetrics] = []
        self._num_samples = 0
        self._interval_s = REPORT_INTERVAL_S if run.is_local else BUCKET_REPORT_INTERVAL_S
        self._written_at_s = float("-inf")

    def add(self, metrics: StepMetrics) -> None:
        """Take one step in; writes when the last time is long enough ago."""
        self._pending.append(metrics)
        self._num_samples += metrics.num_samples
        if time.monotonic() - self._written_at_s >= self._interval_s:
            self.flush("training")

    def flush(self, phase: str) -> None:
        """Write what was collected, and the progress."""
        self._written_at_s = time.monotonic()
        if not self._pending:
            return
        last = self._pending[-1]
        name = f"{STEPS}/{self._attempt:03d}-{self._pending[0].step:08d}.json"
        progress = Progress(
            phase=phase,
            step=last.step,
            num_steps=self._num_steps,
            num_samples=self._num_samples,
            loss=last.loss,
            elapsed_s=last.elapsed_s,
            attempt=self._attempt,
        )
        try:
            self._run.write_json(name, [asdict(metrics) for metrics in self._pending])
            self._pending.clear()
            self._run.write_json(PROGRESS, asdict(progress))
        except OSError as error:
            # Metrics do not end a training: they are kept and written when there is room again.
            logger.warning("metrics of step %d could not be written yet: %s", last.step, error)


def read_progress(run: RunDirectory) -> Progress | None:
    """Return the newest progress, or None before the first."""
    document = run.read_json(PROGRESS)
    return None if document is None else Progress(**document)


def read_steps(run: RunDirectory) -> list[list[StepMetrics]]:
    """Return the steps of each attempt in which any was trained, in order."""
    attempts: dict[str, list[StepMetrics]] = {}
    for name in run.names(STEPS):
        steps = [StepMetrics(**document) for document in run.read_json(f"{STEPS}/{name}") or []]
        attempts.setdefault(name.partition("-")[0], []).extend(steps)
    return [attempts[attempt] for attempt in sorted(attempts)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessReport:
    """One node or worker: what it asked of the bucket, and how long it waited."""

    storage: StorageUsage = field(default_factory=StorageUsage)
    stage: int | None = None
    """Stage of a worker; None for a node's own process, which trains nothing."""

    trained_seconds: float = 0.0
    """By the clock, in its last attempt."""

    waited_seconds: float = 0.0
    """Seconds among them for messages of neighbouring stages."""

    sweeps: SweepCounts = field(default_factory=SweepCounts)
    """Sweeps of tables that are larger than the memory for them, in its last attempt."""

    peak_bytes: int | None = None
    """Most host memory that it had; None where that is not known."""

    sent_bytes_per_step: float = 0.0
    """Activations, gradients and rows, to other workers, in its last attempt."""


def write_process_report(run: RunDirectory, name: str, report: ProcessReport) -> None:
    """Leave a report in the run directory; `name` is the process's own."""
    run.write_json(f"{USAGE}/{name}.json", asdict(report))


def read_process_reports(run: RunDirectory) -> list[ProcessReport]:
    """Return the reports of all processes that came to a good end."""
    return [from_json(ProcessReport, run.require_json(f"{USAGE}/{name}")) for name in run.names(USAGE)]


def idle_shares(reports: list[ProcessReport]) -> dict[int, float]:
    """Return by stage the mean share of its replicas' time, in [0, 1], in which they waited for other stages."""
    shares: dict[int, list[float]] = defaultdict(list)
    for report in reports:
        if report.stage is not None and report.trained_seconds > 0:
            shares[report.stage].append(min(report.waited_seconds / report.trained_seconds, 1.0))
    return {stage: fmean(values) for stage, values in sorted(shares.items())}
