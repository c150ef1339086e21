"""LightGBM on the rows of a baseline: the model that many people would fit in place of ours.

It has the numbers as they are, few-valued columns as categories, and of every categorical column a smoothed target
mean: the share of clicks in earlier rows with the same value. No row sees its own label or that of a later one, so
training rows have features as held-out rows have them.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from heterps_core.data.features import NO_ID, FeatureSpec
from heterps_core.data.row_arrays import RowArrays, targets_of
from heterps_core.errors import ConfigurationError

FEWEST_ROWS = 1_000
"""Training rows; below, each of a few leaves has too few rows for a rate."""

MOST_SECONDS = 10.0
"""Processor time of the search for the number of trees; the fit on all rows afterwards takes about as long again."""

MOST_CATEGORIES = 64
"""A column of at most so many values is also a category of LightGBM's own."""

PRIOR_ROWS = 20.0
"""Rows of the mean click rate that each value's mean begins with."""

_CHECK_SHARE = 0.2
"""Share of the training rows, the last ones, on which the number of trees is chosen."""

_MOST_TREES, _PATIENCE = 500, 30
_PARAMETERS = {
    "objective": "binary",
    "learning_rate": 0.1,
    "num_leaves": 31,
    # More threads spin for one another on busy cores.
    "num_threads": 1,
    "deterministic": True,
    "seed": 0,
    "verbosity": -1,
}

Floats = npt.NDArray[np.floating[Any]]


def boosted_trees(features: FeatureSpec, train: RowArrays, rated: RowArrays) -> npt.NDArray[np.float64]:
    """Fit LightGBM on training rows, in time order, and return its logits [m] of m later rows.

    Raises:
        ConfigurationError: It is not installed, or there are fewer than `FEWEST_ROWS` training rows.
    """
    labels, weights = targets_of([train])
    # Rated rows count for nothing, so they see the training rows alone.
    counts = np.concatenate([weights, np.zeros(len(rated.ids))]).astype(np.float64)
    clicks = np.concatenate([labels, np.zeros(len(rated.ids))]) * counts
    columns, categories = list(np.concatenate([train.dense, rated.dense]).T), []
    for places in features.id_columns:
        ids = np.concatenate([part.ids[:, places.start : places.stop] for part in (train, rated)])
        columns.append(target_means(ids, clicks, counts))
        values, codes = np.unique(ids[:, 0], return_inverse=True)
        if len(places) == 1 and len(values) <= MOST_CATEGORIES:
            categories.append(len(columns))
            columns.append(codes)
    return fit_trees(np.column_stack(columns).astype(np.float32), categories, labels, weights)


def fit_trees(
    columns: npt.NDArray[np.float32], categories: list[int], labels: npt.NDArray[Any], weights: Floats
) -> npt.NDArray[np.float64]:
    """Fit LightGBM on the first n rows of columns [n + m, C], some of which are categories, and rate the others.

    Raises:
        ConfigurationError: See `boosted_trees`.
    """
    try:
        lightgbm = importlib.import_module("lightgbm")
    except ImportError as error:
        raise ConfigurationError("LightGBM is not installed; pip install 'heterps[baselines]'") from error
    num_rows = len(labels)
    if num_rows < FEWEST_ROWS:
        raise ConfigurationError(f"LightGBM needs at least {FEWEST_ROWS:,} training rows, got {num_rows:,}")
    until_s = time.thread_time() + MOST_SECONDS

    def data(rows: slice, **others: Any) -> Any:
        return lightgbm.Dataset(
            columns[rows], labels[rows], weight=weights[rows], categorical_feature=categories, **others
        )

    def end_in_time(tried: Any) -> None:
        if time.thread_time() > until_s:
            raise lightgbm.callback.EarlyStopException(tried.iteration, tried.evaluation_result_list)

    first_check = num_rows - int(num_rows * _CHECK_SHARE)
    fitted = data(slice(0, first_check))
    search = lightgbm.train(
        _PARAMETERS,
        fitted,
        _MOST_TREES,
        valid_sets=[data(slice(first_check, num_rows), reference=fitted)],
        callbacks=[lightgbm.early_stopping(_PATIENCE, verbose=False), end_in_time],
    )
    model = lightgbm.train(_PARAMETERS, data(slice(0, num_rows)), search.best_iteration or _MOST_TREES)
    logits: npt.NDArray[np.float64] = model.predict(columns[num_rows:], raw_score=True, num_threads=1)
    return logits


def target_means(ids: npt.NDArray[np.integer[Any]], clicks: Floats, counts: Floats) -> Floats:
    """Return for each row [n] the smoothed share of clicks in earlier rows with its values, of several the mean.

    With c and w the clicks and the weight of earlier rows that have a value, and r the rate of all earlier rows, the
    mean of the value is (c + p r) / (w + p), where p is `PRIOR_ROWS`; r begins at a half.

    Args:
        ids: [n, values of a row], in time order; `NO_ID` fills shorter lists.
        clicks: [n], the label of each row times its weight.
        counts: [n], the weight of each row.

    Example:
        >>> ids = np.array([[3], [3], [5]])
        >>> target_means(ids, np.array([1.0, 0.0, 1.0]), np.ones(3)).round(3).tolist()
        [0.5, 0.683, 0.5]
    """
    rows, places = np.nonzero(ids != NO_ID)
    values = ids[rows, places]
    rates = (_sum_before(clicks) + 1.0) / (_sum_before(counts) + 2.0)
    order = np.argsort(values, kind="stable")
    values, rows = values[order], rows[order]
    is_new_value = np.diff(values, prepend=values[:1] - 1) != 0
    # A row that has a value twice must not see itself.
    is_new_row = is_new_value | (np.diff(rows, prepend=-1) != 0)
    first_of_value, first_of_row = (
        np.maximum.accumulate(np.where(is_new, np.arange(len(rows)), 0))
        for is_new in (is_new_value, is_new_row)
    )
    seen_clicks, seen = (
        sums[first_of_row] - sums[first_of_value] for sums in map(_sum_before, (clicks[rows], counts[rows]))
    )
    means = (seen_clicks + PRIOR_ROWS * rates[rows]) / (seen + PRIOR_ROWS)
    num_values = np.bincount(rows, minlength=len(ids))
    summed = np.bincount(rows, weights=means, minlength=len(ids))
    found: Floats = np.where(num_values > 0, summed / np.maximum(num_values, 1), rates)
    return found


def _sum_before(values: Floats) -> Floats:
    """Return for each value [n] the sum of those before it."""
    sums: Floats = np.concatenate([[0.0], np.cumsum(values)[:-1]])
    return sums
