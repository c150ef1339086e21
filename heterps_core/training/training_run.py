"""Record of a training run: measured throughput, the loss over time, quality on held-out rows."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from heterps_core.embeddings.swept.sweep_memory import SweepCounts
from heterps_core.errors import TrainingError
from heterps_core.judging.held_out import HeldOutJudgement
from heterps_core.judging.quality import ClickQuality
from heterps_core.training.step_metrics import (
    ProcessReport,
    StepMetrics,
    idle_shares,
    read_process_reports,
    read_steps,
)
from heterps_core.training.storage.run_directory import JOB, RESULT, SHARES, RunDirectory
from heterps_core.training.storage.store import StorageUsage
from heterps_core.training.storage.verified_files import read_unverified_json

_WARMUP_SHARE = 0.1
"""Share of an attempt's first steps that does not count for throughput: allocation, caches, first connections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepFigures:
    """Disk traffic of a stage's tables that are larger than memory."""

    hit_share: float
    """Share of the distinct rows that the batches looked up, in [0, 1], that were in memory already."""

    rows_per_step: float
    """Fetched from disk, on all workers of the stage."""

    disk_bytes_per_sample: float
    """Read and written, on all workers of the stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """The record of a finished run."""

    is_complete: bool
    """All epochs were trained; False after a stop that was asked for."""

    steps: tuple[StepMetrics, ...]
    """Steps of all attempts; a step that was repeated after a restart occurs once, as it was done last."""

    num_attempts: int
    num_repeated_steps: int
    """Done again because a failure came between them and the next checkpoint."""

    trained_seconds: float
    """In which workers ran steps, over all attempts; start-up, evaluation and teardown are not of it."""

    repeated_seconds: float
    """Seconds among them for steps that were done again later."""

    throughput_samples_per_s: float | None
    """Over the steps after the warm-up, by the clock; pauses for checkpoints count. None where these are too few."""

    undisturbed_throughput_samples_per_s: float | None
    """Speed of the median step after the warm-up: what a prediction of the step time should meet."""

    idle_shares: Mapping[int, float]
    """By stage: the share of its workers' time, in [0, 1], in which they waited for other stages."""

    memory_bytes: Mapping[int, tuple[int, int]]
    """By stage: what was counted for one of its workers before the start, and the most that one had."""

    sweeps: Mapping[int, SweepFigures] = field(default_factory=dict)
    """By stage, where its tables are larger than the memory for them; of the last attempt."""
    shares: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """By stage, where its replicas took unequal parts of each batch: the last ones, which add up to 1."""

    sent_bytes_per_step: float = 0.0
    """Activations, their gradients, and rows of tables with theirs, that all workers sent one another."""

    storage: StorageUsage
    """Requests of all other processes to the bucket."""

    judgements: Mapping[str, HeldOutJudgement]
    """Judgements of the trained model on the held-out rows by each label, by the first beside the model that it
    began with; none after a stop, which leaves no time for it."""

    @property
    def judgement(self) -> HeldOutJudgement | None:
        """By the first label, which decides."""
        return next(iter(self.judgements.values()), None)

    @property
    def quality(self) -> ClickQuality | None:
        """Quality of the trained model on the held-out rows, by the first label."""
        return None if self.judgement is None else self.judgement.click_quality()

    @property
    def quality_of_other_labels(self) -> dict[str, ClickQuality]:
        """By column, where a model has several labels."""
        return {name: found.click_quality() for name, found in list(self.judgements.items())[1:]}


def read_training_run(run: RunDirectory) -> TrainingRun:
    """Read the record of a run from its directory.

    Raises:
        TrainingError: The run has no result yet.
    """
    result = run.read_json(RESULT)
    if result is None:
        raise TrainingError(
            f"a finished run must have {RESULT} in its folder {run.location}, but it has none"
        )
    attempts = read_steps(run)
    reports = read_process_reports(run)
    last = attempts[-1] if attempts else []
    by_clock, by_median = _throughputs_samples_per_s(last)
    by_step = {metrics.step: metrics for attempt in attempts for metrics in attempt}
    return TrainingRun(
        is_complete=result["is_complete"],
        steps=tuple(by_step[step] for step in sorted(by_step)),
        num_attempts=len(attempts),
        num_repeated_steps=sum(len(attempt) for attempt in attempts) - len(by_step),
        trained_seconds=sum(attempt[-1].elapsed_s for attempt in attempts if attempt),
        repeated_seconds=sum(_repeated_seconds(a, later) for a, later in itertools.pairwise(attempts)),
        throughput_samples_per_s=by_clock,
        undisturbed_throughput_samples_per_s=by_median,
        idle_shares=idle_shares(reports),
        memory_bytes=_memory_bytes(run, reports),
        sweeps=_sweep_figures(reports, last),
        shares={
            stage: tuple(share / sum(shares) for share in shares)
            for stage, shares in enumerate(run.read_json(SHARES) or ())
            if len(set(shares)) > 1
        },
        sent_bytes_per_step=sum(report.sent_bytes_per_step for report in reports),
        storage=sum((report.storage for report in reports), StorageUsage()),
        judgements={name: HeldOutJudgement.from_json(found) for name, found in result["judgements"].items()},
    )


def _sweep_figures(reports: Sequence[ProcessReport], steps: Sequence[StepMetrics]) -> dict[int, SweepFigures]:
    """Return by stage what its workers report of an attempt with these steps."""
    totals: dict[int, SweepCounts] = defaultdict(SweepCounts)
    for report in reports:
        if report.stage is not None and report.sweeps.rows_asked:
            totals[report.stage] += report.sweeps
    num_samples = sum(metrics.num_samples for metrics in steps)
    return {
        stage: SweepFigures(
            hit_share=1 - counts.rows_fetched / counts.rows_asked,
            rows_per_step=counts.rows_fetched / len(steps),
            disk_bytes_per_sample=(counts.bytes_read + counts.bytes_written) / num_samples,
        )
        for stage, counts in sorted(totals.items())
        if steps
    }


def _throughputs_samples_per_s(steps: Sequence[StepMetrics]) -> tuple[float | None, float | None]:
    """Return the samples per second after an attempt's warm-up: by the clock, and of the median step.

    None where fewer than two steps are left.
    """
    counted = steps[int(len(steps) * _WARMUP_SHARE) :]
    if len(counted) < 2:
        return None, None
    seconds = counted[-1].elapsed_s - counted[0].elapsed_s
    by_clock = sum(metrics.num_samples for metrics in counted[1:]) / seconds
    by_median = statistics.median(
        after.num_samples / (after.elapsed_s - before.elapsed_s)
        for before, after in itertools.pairwise(counted)
    )
    return by_clock, by_median


def _memory_bytes(run: RunDirectory, reports: Sequence[ProcessReport]) -> dict[int, tuple[int, int]]:
    counted = (read_unverified_json(run, JOB) or {}).get("worker_bytes", ())
    peaks: dict[int, int] = {}
    for report in reports:
        if report.stage is not None and report.peak_bytes is not None:
            peaks[report.stage] = max(report.peak_bytes, peaks.get(report.stage, 0))
    return {stage: (counted[stage], peak) for stage, peak in sorted(peaks.items()) if stage < len(counted)}


def _repeated_seconds(attempt: Sequence[StepMetrics], later: Sequence[StepMetrics]) -> float:
    """Return the time of an attempt's steps that the next one began before."""
    if not attempt or not later:
        return 0.0
    kept = [metrics.elapsed_s for metrics in attempt if metrics.step < later[0].step]
    return attempt[-1].elapsed_s - max(kept, default=0.0)
