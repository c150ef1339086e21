"""The outcome of each stage: its predicted, measured and idle time, and its part of the bill."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from heterps_core.planning.cost_model.evaluation import StageEvaluation
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.training_run import SweepFigures, TrainingRun
from infra.billing.bill import Bill


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOutcome:
    """One launched stage."""

    index: int
    device_type: str
    """Device type of the plan; in a dry run this machine stands in for it."""

    num_replicas: int
    predicted_seconds: float
    """Time of the stage's work for one training batch."""

    measured_seconds: float | None
    """Time of a step without waits for other stages; None where it was not measured."""

    idle_share: float | None
    """Share of a step, in [0, 1], in which its workers waited for other stages."""

    billed_usd: float
    """With start-up, evaluation and teardown."""

    sweep: SweepFigures | None = None
    """None where all rows of its tables are in memory."""


def stage_outcomes(
    stages: Sequence[Stage],
    predicted: Sequence[float],
    training: TrainingRun,
    bills: Sequence[Bill],
    *,
    batch_size: int,
) -> tuple[StageOutcome, ...]:
    """Return the outcome of each launched stage.

    Args:
        predicted: Of each stage, the seconds of its work for one training batch.
        bills: Of all launches.
    """
    step_seconds = measured_step_seconds(training, batch_size=batch_size)
    billed_usd: dict[int, float] = defaultdict(float)
    for bill in bills:
        for line in bill.lines:
            billed_usd[line.stage] += line.usd
    outcomes = []
    for index, (stage, seconds) in enumerate(zip(stages, predicted, strict=True)):
        idle_share = training.idle_shares.get(index)
        outcomes.append(
            StageOutcome(
                index=index,
                device_type=stage.device_types,
                num_replicas=stage.num_replicas,
                predicted_seconds=seconds,
                measured_seconds=None
                if step_seconds is None or idle_share is None or idle_share >= 1
                else step_seconds * (1 - idle_share),
                idle_share=idle_share,
                billed_usd=billed_usd[index],
                sweep=training.sweeps.get(index),
            )
        )
    return tuple(outcomes)


def stage_series(stages: Sequence[StageOutcome]) -> dict[str, list[tuple[int, float]]]:
    """Return the figures of all stages as series over the index of the stage.

    So a run has as many names with ten stages as with one: each name of 300 runs makes MLflow's table slower.
    """
    series: dict[str, list[tuple[int, float]]] = {}
    for stage in stages:
        figures = {
            "stage/predicted_step_seconds": stage.predicted_seconds,
            "stage/measured_step_seconds": stage.measured_seconds,
            "stage/billed_usd": stage.billed_usd,
            "stage/idle_share": stage.idle_share,
        }
        if stage.sweep is not None:
            figures |= {
                "stage/hit_share": stage.sweep.hit_share,
                "stage/cold_rows_per_step": stage.sweep.rows_per_step,
                "stage/disk_bytes_per_sample": stage.sweep.disk_bytes_per_sample,
            }
        for name, value in figures.items():
            if value is not None:
                series.setdefault(name, []).append((stage.index, value))
    return series


def seconds_by_stage(parts: Sequence[StageEvaluation], *, is_dry_run: bool) -> tuple[float, ...]:
    """Return the predicted seconds of each stage's work for one batch.

    On rented machines computing and communication overlap, as the cost model has it; a worker of a dry run does one
    after the other.
    """
    if not is_dry_run:
        return tuple(part.seconds for part in parts)
    return tuple(part.compute_seconds + part.communication_seconds for part in parts)


def measured_step_seconds(training: TrainingRun, *, batch_size: int) -> float | None:
    """Return the time of the median step; None where too few were trained."""
    throughput = training.undisturbed_throughput_samples_per_s
    return None if throughput is None else batch_size / throughput
