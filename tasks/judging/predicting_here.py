"""Predictions of exported models on this machine, for judging beside the champion and a logistic regression."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.reading.row_batch import first_label
from heterps_core.data.row_arrays import targets_of
from heterps_core.errors import ConfigurationError, OtherColumnsError
from heterps_core.judging.held_out import HeldOutJudgement
from heterps_core.judging.intervals import Estimate
from heterps_core.judging.quality import auc_difference
from tasks.judging.baseline import Baseline
from tasks.records.champion import Champion

if TYPE_CHECKING:
    from heterps_core.serving.exported_model import ClickPredictor


class CannotPredictError(ConfigurationError):
    """The champion cannot predict these rows."""


def judge_here(dataset: PreparedDataset, folder: Path, champion: Champion | None) -> HeldOutJudgement:
    """Judge an exported model beside the champion on this machine, row group by row group.

    Raises:
        CannotPredictError: The rows lack a column of the champion, or its code cannot be imported.
        ConfigurationError: The code of the model cannot.
    """
    from heterps_core.judging.held_out import judge_held_out
    from heterps_core.serving.held_out_predictions import held_out_scores

    scores = held_out_scores(_predictor(folder), dataset)
    if champion is None:
        return judge_held_out(scores)
    try:
        others = held_out_scores(_predictor(champion.folder), dataset)
    except (OtherColumnsError, ConfigurationError) as error:
        raise CannotPredictError(str(error)) from error
    return judge_held_out(scores, others)


def against_baseline(
    dataset: PreparedDataset, folder: Path, baseline: Baseline | str, *, confidence: float
) -> Estimate | str:
    """Return AUC of a model less that of the logistic regression on the rows that it rated, or why there is none."""
    from heterps_core.serving.held_out_predictions import predicted_parts

    if isinstance(baseline, str):
        return f"there is none: {baseline}"
    predictor = _predictor(folder)
    parts = [part for run in baseline.rated_runs for part in predicted_parts(predictor, dataset, *run)]
    labels, weights = targets_of([rows for rows, _ in parts])
    logits = np.concatenate([first_label(some) for _, some in parts])
    return auc_difference(labels, logits, baseline.logits, weights).interval(confidence=confidence)


def _predictor(folder: Path) -> ClickPredictor:
    """Return an exported model, which may use all cores: nothing else computes meanwhile."""
    from heterps_core.compute_device import use_all_cores
    from heterps_core.serving.exported_model import ClickPredictor

    use_all_cores()
    return ClickPredictor(folder)
