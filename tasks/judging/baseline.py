"""Logistic regression on the same features and split: the least that a trained model must beat.

Without it an AUC says little, as it depends on the data more than on the model. Its penalty is chosen
on the last part of the training rows, so that the comparison is with a tuned opponent. It is fitted on a sample of
bounded size and rates the held-out rows in parts, so that its memory does not grow with the data.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from prefect import task
from prefect.cache_policies import NO_CACHE

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import FeatureSpec
from heterps_core.data.row_arrays import RowArrays
from heterps_core.judging.quality import ClickQuality, measure_quality
from tasks.data import PreparedClicks

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import LogisticRegression

MOST_TRAIN_ROWS = 200_000
"""Rows that are fitted on: a fifth of a gigabyte as sparse matrices (docs/LOG.md, 2026-11-22)."""

NUM_RUNS = 50
"""Runs of rows that a sample is made of; for each one or two row groups are read, which may hold a million rows."""

PENALTIES = (0.003, 0.01, 0.03, 0.1, 0.3)
"""Inverse strengths (scikit-learn's C) that are tried."""

TUNING_SHARE = 0.2
"""Of the training rows, the last ones, on which the penalty is chosen."""

MAX_ITERATIONS = 200
TOLERANCE = 1e-3
"""Of the gradient; a smaller one changes the AUC in the fourth decimal only."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """A logistic regression's quality on the held-out rows."""

    quality: ClickQuality
    num_train_rows: int
    """That it was fitted on: all training rows, or a sample of `MOST_TRAIN_ROWS`."""

    logits: npt.NDArray[np.float64] = field(repr=False, compare=False)
    """[num_eval_rows], of the held-out rows in order."""


@task(name="logistic regression baseline", cache_policy=NO_CACHE)
def measure_baseline(clicks: PreparedClicks) -> Baseline | str:
    """Fit a logistic regression on the training rows and rate it on the held-out rows; or return why there is none.

    Nothing is raised: the model that it is compared with has been trained and registered, and shall not be lost.
    """
    try:
        return _fitted_baseline(clicks.open())
    except Exception as problem:
        logger.warning("there is no logistic regression to compare with", exc_info=problem)
        first_line = str(problem).partition("\n")[0]
        return f"it failed with {type(problem).__name__}: {first_line}"


def _fitted_baseline(dataset: PreparedDataset) -> Baseline | str:
    from scipy.sparse import csr_matrix, vstack

    parts = [
        (design_matrix(part, dataset.features), part.labels)
        for first, stop in sampled_runs(dataset.num_train_rows, at_most=MOST_TRAIN_ROWS)
        for part in dataset.parts(first, stop)
    ]
    labels = np.concatenate([labels for _, labels in parts])
    if len(np.unique(labels)) < 2:
        return "the training rows are all of one class"
    rows = csr_matrix(vstack([rows for rows, _ in parts], format="csr"))
    # Columns that no training row uses have no weight; most buckets are empty.
    used = np.flatnonzero(np.bincount(rows.indices, minlength=rows.shape[1]))
    rows = rows[:, used]
    model = _fit(rows, labels, _choose_penalty(rows, labels))
    logits = np.concatenate(
        [
            model.decision_function(design_matrix(part, dataset.features)[:, used])
            for part in dataset.parts(dataset.num_train_rows, dataset.manifest.num_rows)
        ]
    )
    return Baseline(
        quality=measure_quality(dataset.eval_labels, logits),
        num_train_rows=len(labels),
        logits=logits,
    )


def sampled_runs(num_rows: int, *, at_most: int) -> list[tuple[int, int]]:
    """Return runs of rows (first, stop) of at most so many rows together, spread evenly: few row groups are read.

    Example:
        >>> sampled_runs(30, at_most=100), sampled_runs(10**6, at_most=1_000)[:2]
        ([(0, 30)], [(0, 20), (20000, 20020)])
    """
    if num_rows <= at_most:
        return [(0, num_rows)]
    num_runs = min(NUM_RUNS, at_most)
    firsts = [number * num_rows // num_runs for number in range(num_runs)]
    return [(first, first + at_most // num_runs) for first in firsts]


def design_matrix(rows: RowArrays, features: FeatureSpec) -> csr_matrix:
    """Return rows [n] as a sparse matrix [n, D + all slot rows]: dense columns, then one-hot ids."""
    from scipy.sparse import csr_matrix, hstack

    ids = rows.ids.astype(np.int64) + np.asarray(features.slot_offsets)
    one_hot = csr_matrix(
        (np.ones(ids.size, dtype=np.float32), ids.ravel(), np.arange(0, ids.size + 1, ids.shape[1])),
        shape=(len(ids), features.total_rows),
    )
    return csr_matrix(hstack([csr_matrix(rows.dense), one_hot], format="csr"))


def _choose_penalty(rows: csr_matrix, labels: npt.NDArray[np.uint8]) -> float:
    """Return the C with the least log-loss on the last training rows, after a fit on those before them."""
    first_check = len(labels) - int(len(labels) * TUNING_SHARE)
    if first_check == len(labels) or len(np.unique(labels[:first_check])) < 2:
        return PENALTIES[0]
    losses = {}
    for penalty in PENALTIES:
        model = _fit(rows[:first_check], labels[:first_check], penalty)
        logits = model.decision_function(rows[first_check:])
        losses[penalty] = measure_quality(labels[first_check:], logits).log_loss
    logger.info("log-loss of the baseline by inverse penalty: %s", losses)
    return min(losses, key=lambda penalty: losses[penalty])


def _fit(rows: csr_matrix, labels: npt.NDArray[np.uint8], inverse_penalty: float) -> LogisticRegression:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=inverse_penalty, max_iter=MAX_ITERATIONS, tol=TOLERANCE)
    with warnings.catch_warnings():
        # The limit bounds the time on hard data; what is lost by it is the baseline's.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(rows, labels)
