"""Logistic regression on the same features and split: the least that a trained model must beat.

Without it an AUC says little, as it depends on the data more than on the model. Its penalty is chosen
on the last part of the training rows, so that the comparison is with a tuned opponent.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from prefect import task
from prefect.cache_policies import NO_CACHE

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.quality import ClickQuality, measure_quality
from tasks.data import PreparedClicks

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import LogisticRegression

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
    inverse_penalty: float
    """The C that was chosen."""


@task(name="logistic regression baseline", cache_policy=NO_CACHE)
def measure_baseline(clicks: PreparedClicks) -> Baseline | None:
    """Fit a logistic regression on the training rows and rate it on the held-out rows.

    Returns:
        None where the training rows are all of one class: there is nothing to fit.
    """
    dataset = clicks.open()
    num_train = dataset.num_train_rows
    labels = dataset.labels[:num_train]
    if len(np.unique(labels)) < 2:
        return None
    rows = design_matrix(dataset, 0, num_train)
    # Columns that no training row uses have no weight; most buckets are empty.
    used = np.flatnonzero(np.bincount(rows.indices, minlength=rows.shape[1]))
    rows = rows[:, used]
    inverse_penalty = _choose_penalty(rows, labels)
    eval_rows = design_matrix(dataset, num_train, num_train + dataset.num_eval_rows)[:, used]
    logits = _fit(rows, labels, inverse_penalty).decision_function(eval_rows)
    return Baseline(quality=measure_quality(dataset.eval_labels, logits), inverse_penalty=inverse_penalty)


def design_matrix(dataset: PreparedDataset, start: int, stop: int) -> csr_matrix:
    """Return rows start..stop as a sparse matrix [n, D + all slot rows]: dense columns, then one-hot ids."""
    from scipy.sparse import csr_matrix, hstack

    ids = dataset.ids[start:stop].astype(np.int64) + np.asarray(dataset.features.slot_offsets)
    one_hot = csr_matrix(
        (np.ones(ids.size, dtype=np.float32), ids.ravel(), np.arange(0, ids.size + 1, ids.shape[1])),
        shape=(len(ids), dataset.features.total_rows),
    )
    return csr_matrix(hstack([csr_matrix(dataset.dense[start:stop]), one_hot], format="csr"))


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
