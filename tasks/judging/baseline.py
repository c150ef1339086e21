"""Models that people pick without us, on the same features and split: the least that a trained model must beat.

Without them an AUC says little, as it depends on the data more than on the model. Their settings are chosen on the
last part of the training rows, so that the comparison is with tuned opponents. They are fitted on a sample of bounded
size and rate another of the held-out rows, so that their memory does not grow with the data.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import NO_ID, FeatureSpec
from heterps_core.data.row_arrays import RowArrays, targets_of
from heterps_core.data.row_groups import sampled_runs
from heterps_core.errors import HeterpsError
from heterps_core.judging.quality import ClickQuality, log_loss, measure_quality
from tasks.data import PreparedClicks
from tasks.judging.boosted_trees import boosted_trees
from tasks.steps import step

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import LogisticRegression

MOST_TRAIN_ROWS = MOST_RATED_ROWS = 200_000
"""Rows that are fitted on, and held-out rows that are rated: a fifth of a gigabyte as sparse matrices (docs/LOG.md,
2026-11-22)."""

NUM_RUNS = 50
"""Runs of rows that a sample is made of; for each one or two row groups are read, which may hold a million rows."""

_PENALTIES = (0.003, 0.01, 0.03, 0.1, 0.3)
"""Inverse strengths (scikit-learn's C) that are tried."""

_TUNING_SHARE = 0.2
"""Share of the training rows, the last ones, on which the penalty is chosen."""

_MAX_ITERATIONS = 200
_TOLERANCE = 1e-3
"""Tolerance of the gradient; a smaller one changes the AUC in the fourth decimal only."""

logger = logging.getLogger(__name__)


Fit = Callable[[FeatureSpec, RowArrays, RowArrays], npt.NDArray[np.float64]]
"""Returns logits [m] of m later rows after a fit on training rows; both are in time order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """A baseline's quality on held-out rows: all, or a sample of `MOST_RATED_ROWS`."""

    quality: ClickQuality
    num_train_rows: int
    """Rows that it was fitted on: all training rows, or a sample of `MOST_TRAIN_ROWS`."""

    logits: npt.NDArray[np.float64] = field(repr=False, compare=False)
    """[n], for the held-out rows that were rated, in order."""

    rated_runs: tuple[tuple[int, int], ...]
    """First and stop of the runs of rows that were rated."""

    processor_seconds: float = 0.0
    """For fitting and rating."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledRows:
    """Training rows and held-out rows in time order, of bounded number."""

    features: FeatureSpec
    train: RowArrays
    rated: RowArrays
    rated_runs: tuple[tuple[int, int], ...]
    logit_shift: float

    @classmethod
    def of(cls, dataset: PreparedDataset) -> SampledRows:
        """Read the rows; each column is hashed to a row of its table, also where ids are dynamic."""
        # Which of the model's ids have a row is of no use to a model of its own.
        features = replace(dataset.features, dynamic_ids=None)
        first_held_out = dataset.num_train_rows
        train_runs = sampled_runs(first_held_out, at_most=MOST_TRAIN_ROWS, num_runs=NUM_RUNS)
        rated_runs = tuple(
            (first_held_out + first, first_held_out + stop)
            for first, stop in sampled_runs(dataset.num_eval_rows, at_most=MOST_RATED_ROWS, num_runs=NUM_RUNS)
        )
        train, rated = (
            joined_rows([part for run in runs for part in dataset.parts(*run, features=features)])
            for runs in (train_runs, rated_runs)
        )
        return cls(
            features=features,
            train=train,
            rated=rated,
            rated_runs=rated_runs,
            logit_shift=dataset.manifest.schema.logit_shift,
        )


@step("baselines")
def measure_baselines(clicks: PreparedClicks) -> dict[str, Baseline | str]:
    """Fit each of `BASELINES` on training rows and rate it on held-out rows; or say why there is none.

    Nothing is raised: the model that they are compared with has been trained and registered, and shall not be lost.
    """
    try:
        rows = SampledRows.of(clicks.open())
    except Exception as problem:
        return dict.fromkeys(BASELINES, _why_none(problem))
    return {name: measure_baseline(fit, rows) for name, fit in BASELINES.items()}


def measure_baseline(fit: Fit, rows: SampledRows) -> Baseline | str:
    """Fit a baseline and rate it; or return in one line why there is none."""
    started_s = time.thread_time()
    train_labels, _ = targets_of([rows.train])
    if len(np.unique(train_labels)) < 2:
        return "the training rows are all of one class"
    try:
        logits = fit(rows.features, rows.train, rows.rated) + rows.logit_shift
        labels, weights = targets_of([rows.rated])
        return Baseline(
            quality=measure_quality(labels, logits, weights),
            num_train_rows=len(train_labels),
            logits=logits,
            rated_runs=rows.rated_runs,
            processor_seconds=time.thread_time() - started_s,
        )
    except Exception as problem:
        return _why_none(problem)


def _why_none(problem: Exception) -> str:
    first_line = str(problem).partition("\n")[0]
    if isinstance(problem, HeterpsError):
        return first_line
    logger.warning("there is no baseline to compare with", exc_info=problem)
    return f"it failed with {type(problem).__name__}: {first_line}"


def joined_rows(parts: Sequence[RowArrays]) -> RowArrays:
    """Return the rows of all parts, with their first label and what each row counts for."""
    labels, weights = targets_of(parts)
    return RowArrays(
        dense=np.concatenate([part.dense for part in parts]),
        ids=np.concatenate([part.ids for part in parts]),
        labels=labels,
        weights=weights,
    )


def logistic_regression(features: FeatureSpec, train: RowArrays, rated: RowArrays) -> npt.NDArray[np.float64]:
    """Fit scikit-learn's logistic regression on numbers and one-hot ids; returns logits [m] of the rated rows."""
    labels, weights = targets_of([train])
    rows = _design_matrix(train, features)
    # Columns that no training row uses have no weight; most buckets are empty.
    used = np.unique(rows.indices)
    rows = _columns_of(rows, used)
    model = _fit(rows, labels, weights, _choose_penalty(rows, labels, weights))
    logits: npt.NDArray[np.float64] = model.decision_function(
        _columns_of(_design_matrix(rated, features), used)
    )
    return logits


def _design_matrix(rows: RowArrays, features: FeatureSpec) -> csr_matrix:
    """Return rows [n] as a sparse matrix [n, D + all slot rows]: dense columns, then how often each id occurs."""
    from scipy.sparse import csr_matrix, hstack

    is_there = rows.ids != NO_ID
    ids = (rows.ids + np.repeat(features.slot_offsets, features.slot_lengths))[is_there]
    starts = np.concatenate([[0], np.cumsum(is_there.sum(axis=1))])
    one_hot = csr_matrix(
        (np.ones(len(ids), dtype=np.float32), ids, starts), shape=(len(rows.ids), features.total_rows)
    )
    return csr_matrix(hstack([csr_matrix(rows.dense), one_hot], format="csr"))


def _columns_of(rows: csr_matrix, used: npt.NDArray[np.integer[Any]]) -> csr_matrix:
    """Return ascending columns of a sparse matrix in the time of its values: scipy's takes that of all columns."""
    from scipy.sparse import csr_matrix

    places = np.searchsorted(used, rows.indices)
    is_kept = used[np.minimum(places, len(used) - 1)] == rows.indices
    starts = np.concatenate([[0], np.cumsum(is_kept)])[rows.indptr]
    return csr_matrix((rows.data[is_kept], places[is_kept], starts), shape=(rows.shape[0], len(used)))


def _choose_penalty(
    rows: csr_matrix, labels: npt.NDArray[np.uint8], weights: npt.NDArray[np.floating[Any]]
) -> float:
    """Return the C with the least log-loss on the last training rows, after a fit on those before them."""
    first_check = len(labels) - int(len(labels) * _TUNING_SHARE)
    if first_check == len(labels) or len(np.unique(labels[:first_check])) < 2:
        return _PENALTIES[0]
    losses = {}
    for penalty in _PENALTIES:
        model = _fit(rows[:first_check], labels[:first_check], weights[:first_check], penalty)
        logits = model.decision_function(rows[first_check:])
        losses[penalty] = log_loss(labels[first_check:], logits, weights[first_check:])
    logger.info("log-loss of the baseline by inverse penalty: %s", losses)
    return min(losses, key=lambda penalty: losses[penalty])


def _fit(
    rows: csr_matrix,
    labels: npt.NDArray[np.uint8],
    weights: npt.NDArray[np.floating[Any]],
    inverse_penalty: float,
) -> LogisticRegression:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    model = LogisticRegression(C=inverse_penalty, max_iter=_MAX_ITERATIONS, tol=_TOLERANCE)
    # More threads wait for one another in loops, and are no faster.
    with threadpool_limits(1), warnings.catch_warnings():
        # The limit bounds the time on hard data; what is lost by it is the baseline's.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(rows, labels, sample_weight=weights)


LOGISTIC_REGRESSION, LIGHTGBM = "logistic regression", "LightGBM"
BASELINES: dict[str, Fit] = {LOGISTIC_REGRESSION: logistic_regression, LIGHTGBM: boosted_trees}
"""By the names that people know; a first champion is held against the first."""
