"""How large the job is that a plan is made for.

Rented machines train on the data as it is. A dry run stands for a job that this machine could not hold: the
samples of a night, and tables as large as production has them. It trains the same model on the rows at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import FeatureSpec
from heterps_core.training.job import default_batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedJob:
    """What a plan is made for."""

    num_samples: int
    """Of one epoch."""

    features: FeatureSpec
    """Columns and table sizes."""

    batch_size: int


def planned_job(
    dataset: PreparedDataset,
    *,
    is_dry_run: bool,
    batch_size: int | None,
    planned_samples: int | None,
    planned_rows_per_slot: int | None,
) -> PlannedJob:
    """Return the job that a plan is made for; `None` stands for what the data has."""
    num_samples = planned_samples if is_dry_run and planned_samples else dataset.num_train_rows
    features = dataset.features
    if is_dry_run and planned_rows_per_slot:
        features = replace(features, slot_rows=(planned_rows_per_slot,) * features.num_slots)
    return PlannedJob(
        num_samples=num_samples,
        features=features,
        batch_size=batch_size or default_batch_size(num_samples),
    )
