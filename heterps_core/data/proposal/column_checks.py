"""What is suspicious in a sample of rows: a column that gives the label away, and rows out of the order of time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heterps_core.judging.quality import roc_auc

LEAK_AUC = 0.95
"""Of one column alone. Whole models of clicks reach 0.7 to 0.85, so such a column was filled after the click."""

FEWEST_CLICKS = 20
"""In the checked half; fewer say little of an AUC."""

OUT_OF_ORDER = "rows are not in its order"

_PRIOR_ROWS = 10.0
"""Rows at the mean click rate that each value is thought to have besides."""


def leak_remark(column: pa.Array, is_click: npt.NDArray[np.bool_]) -> str:
    """Return what to check of a column by which alone the label can be told; empty where it cannot.

    The click rate of each value in the first half of the rows scores the rows of the second half; of a column of
    numbers the number itself is a score, too.

    Args:
        column: [n] numbers or texts; null where missing.
        is_click: [n].
    """
    half = len(column) // 2
    clicks = is_click[half:]
    if min(clicks.sum(), (~clicks).sum()) < FEWEST_CLICKS:
        return ""
    scores = [_click_rates(column, is_click, half)]
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        numbers = column.slice(half).cast(pa.float64())
        scores.append(numbers.fill_null(pc.mean(numbers).as_py() or 0.0).to_numpy(zero_copy_only=False))
    found = [
        auc
        for auc in (roc_auc(clicks, each) for each in scores if np.isfinite(each).all())
        if auc is not None
    ]
    auc = max((max(auc, 1 - auc) for auc in found), default=0.5)
    if auc < LEAK_AUC:
        return ""
    return f"tells the label alone (AUC {auc:.3f}): leave it out if it is not known before the click"


def _click_rates(column: pa.Array, is_click: npt.NDArray[np.bool_], half: int) -> npt.NDArray[np.float64]:
    """Return for each row of the second half the click rate of its value in the first."""
    values = column.dictionary_encode().indices.fill_null(-1).to_numpy(zero_copy_only=False) + 1
    counts, clicks = (
        np.bincount(values[:half], weights=weights, minlength=int(values.max(initial=0)) + 1)
        for weights in (np.ones(half), is_click[:half].astype(np.float64))
    )
    rates = (clicks + _PRIOR_ROWS * is_click[:half].mean()) / (counts + _PRIOR_ROWS)
    found: npt.NDArray[np.float64] = rates[values[half:]]
    return found


def order_remark(times: pa.Array) -> str:
    """Return what to check of a column of times; says so where rows are not in their order."""
    known = times.drop_null()
    earlier = pc.less(known.slice(1), known.slice(0, max(len(known) - 1, 0)))
    share = pc.mean(earlier).as_py() or 0.0
    if share == 0.0:
        return "a time: write what matters of it, such as the hour, as a column"
    return f"{OUT_OF_ORDER} ({share:.0%} are before their neighbour): sort them, as the last are held out"
