"""The batch as a decision of the plan: samples to a target AUC by a curve of short trainings, at least cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from heterps_core.data.dataset import PreparedDataset
from heterps_core.errors import ConfigurationError, InfeasiblePlanError
from heterps_core.json_codec import JsonDocument
from heterps_core.planning.quality_curve import QualityCurve, QualityPoint, SamplesNeeded
from heterps_core.text_table import usd_text
from heterps_core.training.job import TrainingConfig
from tasks.running.progress import log_step
from tasks.steps import step

_LARGEST_SHARE = 0.05
"""Share of the training rows that short trainings take, the earliest ones."""

_JUDGED_SHARE, _MOST_JUDGED = 0.2, 50_000
"""The latest training rows, on which they are judged; held-out rows stay unseen."""

_LEAST_STEPS = 30
"""With fewer the AUC is that of an optimizer that has hardly begun, which no law of samples describes."""

_LEAST_BATCH = 8
_SHIFTS = (4, 2, 0)
"""The three batches are the largest one with so many steps, a quarter and a sixteenth of it."""

_FARTHEST = 8
"""Largest batch that is planned, over the largest measured one."""

_LEAST_PLANNED_STEPS = 256
"""Of a planned training, as by default (`default_batch_size`)."""

QUALITY_MARGIN = 0.0005
"""Batches whose AUC by the curve is so near the best one count as equally good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptCurve(JsonDocument):
    """The trainings of a curve, as a run keeps them for later ones."""

    settings: str
    """Rates, penalties and optimizers; a curve counts for the same ones alone."""

    points: tuple[QualityPoint, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOption:
    """A batch with the samples to train in it."""

    batch_size: int
    num_samples: int
    needed: SamplesNeeded | None
    """None without a target: all samples are trained."""


@step("measure quality curve")
def measure_points(
    dataset: PreparedDataset, model: str, config_of: Callable[[int], TrainingConfig]
) -> tuple[QualityPoint, ...]:
    """Train on at most a twentieth of the rows in three batches, and judge on the latest training rows.

    Args:
        config_of: Returns the numbers with which the trainer would train in batches of a size, for one epoch.

    Raises:
        ConfigurationError: All judged labels are equal.
        TrainingError: A training diverged.
    """
    from heterps_core.training.tuning.in_one_process import train_in_turns

    num_rows = dataset.num_train_rows
    judged = (num_rows - min(int(num_rows * _JUDGED_SHARE), _MOST_JUDGED), num_rows)
    if len(set(dataset.targets(*judged)[0].tolist())) < 2:
        raise ConfigurationError(
            f"target_auc needs clicks and other rows, but all of the latest {judged[1] - judged[0]:,} training "
            f"rows have the same label; take other rows, or leave target_auc out"
        )
    most = int(num_rows * _LARGEST_SHARE)
    largest = 1 << max(most // _LEAST_STEPS, 1).bit_length() - 1
    points = []
    for batch_size in sorted({max(largest >> shift, _LEAST_BATCH) for shift in _SHIFTS}):
        for part in (each for each in (most // 4, most // 2, most) if each >= batch_size * _LEAST_STEPS):
            *_, quality = train_in_turns(
                dataset.until(part), model, config_of(batch_size), rated=judged, num_turns=1
            )
            assert quality.auc is not None
            points.append(QualityPoint(num_samples=part, batch_size=batch_size, auc=quality.auc))
    return tuple(points)


def options_of(curve: QualityCurve, *, target_auc: float | None, num_samples: int) -> list[BatchOption]:
    """Return the batches in which a target is reached by at most so many samples, the largest batch first.

    Without a target they are those that reach, by all samples, the best AUC less `QUALITY_MARGIN`. None is returned
    where the curve reaches the target with no batch.
    """
    measured = [point.batch_size for point in curve.points]
    most = min(max(measured) * _FARTHEST, max(num_samples // _LEAST_PLANNED_STEPS, min(measured)))
    # Each planned batch is profiled, so batches are a factor of four apart.
    batches = [1 << power for power in range(most.bit_length() - 1, -1, -2) if 1 << power >= min(measured)]
    if target_auc is None:
        aucs = {batch: curve.auc_after(num_samples, batch) for batch in batches}
        least = max(aucs.values()) - QUALITY_MARGIN
        return [
            BatchOption(batch_size=batch, num_samples=num_samples, needed=None)
            for batch, auc in aucs.items()
            if auc >= least
        ]
    needs = {batch: curve.samples_needed(target_auc, batch) for batch in batches}
    return [
        BatchOption(batch_size=batch, num_samples=max(math.ceil(needed.median), batch), needed=needed)
        for batch, needed in needs.items()
        if needed.median <= num_samples
    ]


Plan = TypeVar("Plan")


def plans_of_batches(
    options: Sequence[BatchOption], plan: Callable[[BatchOption], Plan], usd_of: Callable[[Plan], float]
) -> tuple[dict[int, Plan], dict[int, float]]:
    """Plan the batches in turn, the largest first; return the plans by batch, and bounds of those left out.

    A sample in a smaller batch costs no less, so a batch is left out where its samples at the price of the next
    larger planned batch already cost as much as the cheapest plan.

    Raises:
        InfeasiblePlanError: Why the largest batch has no plan, where none has one.
    """
    plans: dict[int, Plan] = {}
    bounds_usd: dict[int, float] = {}
    refused: list[InfeasiblePlanError] = []
    usd_per_sample = 0.0
    for option in options:
        bound_usd = usd_per_sample * option.num_samples
        if plans and bound_usd >= min(map(usd_of, plans.values())):
            bounds_usd[option.batch_size] = bound_usd
            continue
        log_step("batch", f"{option.num_samples:,} samples in batches of {option.batch_size:,}:")
        try:
            found = plan(option)
        except InfeasiblePlanError as problem:
            refused.append(problem)
            continue
        plans[option.batch_size] = found
        usd_per_sample = usd_of(found) / option.num_samples
    if not plans:
        raise refused[0]
    return plans, bounds_usd


def choice_text(
    option: BatchOption,
    curve: QualityCurve,
    costs: Mapping[int, str],
    bounds_usd: Mapping[int, float],
    *,
    target_auc: float | None,
    fastest: str,
) -> str:
    """Return in a line why a batch was taken: target, samples with their range, and costs in other batches."""
    others = [f"{size:,} {cost}" for size, cost in costs.items() if size != option.batch_size]
    others += [f"{size:,} at least {usd_text(usd)}" for size, usd in bounds_usd.items()]
    if option.needed is None:
        auc = curve.auc_after(option.num_samples, option.batch_size)
        aim = f"batch {option.batch_size:,}, AUC {auc:.4f}, within {QUALITY_MARGIN} of the best batch"
    else:
        low, high = (f"{number:,.0f}" for number in (option.needed.low, option.needed.high))
        aim = f"AUC {target_auc:.4f} needs {option.num_samples:,} samples ({low} to {high}) in batches of "
        aim += f"{option.batch_size:,}"
    return (
        f"{aim} for {costs[option.batch_size]}; other batches: {', '.join(others) or 'none in reach'}{fastest}; "
        f"extrapolated from {len(curve.points)} trainings of at most "
        f"{max(point.num_samples for point in curve.points):,} samples"
    )
