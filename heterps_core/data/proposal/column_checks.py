"""What is suspicious in a sample of rows: a column that gives the label away, and rows out of the order of time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.proposal.table_sample import SampledColumn
from heterps_core.data.reading.row_batch import first_label
from heterps_core.data.reading.time_order import comparable_times, is_earlier
from heterps_core.data.row_groups import sampled_runs
from heterps_core.judging.quality import roc_auc

LEAK_AUC = 0.95
"""AUC of one column alone. Whole models of clicks reach 0.7 to 0.85, so such a column was filled after the click."""

FEWEST_CLICKS = 20
"""In the checked half; fewer say little of an AUC."""

MOST_JUDGED_ROWS, JUDGED_RUNS = 40_000, 4
"""Rows of a prepared data set to judge, and the runs that they lie in."""

_TIME_WORDS = {"ts", "at", "dt", "day", "hour", "epoch", "when"}
_TIME_ENDINGS = ("time", "times", "stamp", "date")

_EPOCHS_S = (631_152_000, 4_102_444_800)
"""Seconds since 1970 of the years 1990 to 2100; a number in them, or in other units in these years, may be a time."""

_UNITS_PER_S = (1, 10**3, 10**6, 10**9)
_DAY_DIGITS = {8: 1, 10: 10**2, 12: 10**4, 14: 10**6}
"""By the digits of numbers such as 20261101 and 2026110123, what to divide by for the day."""

_TIME_SHARE = 0.95
"""Share of the numbers that must look like times; others, such as 0, stand for none."""

_PRIOR_ROWS = 10.0
"""Rows at the mean click rate that each value is thought to have besides."""


def leak_auc(column: pa.Array, is_click: npt.NDArray[np.bool_]) -> float:
    """Return how well a column alone predicts the label: an AUC in [0.5, 1]; 0.5 for too few clicks or others.

    The click rate of each value in the first half of the rows scores the rows of the second half; of a column of
    numbers the number itself is a score, too.

    Args:
        column: [n] numbers or texts; null where missing.
        is_click: [n].
    """
    half = len(column) // 2
    clicks = is_click[half:]
    if min(clicks.sum(), (~clicks).sum()) < FEWEST_CLICKS:
        return 0.5
    scores = [_click_rates(column, is_click, half)]
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        numbers = column.slice(half).cast(pa.float64(), safe=False)
        scores.append(numbers.fill_null(pc.mean(numbers).as_py() or 0.0).to_numpy(zero_copy_only=False))
    found = [
        auc
        for auc in (roc_auc(clicks, each) for each in scores if np.isfinite(each).all())
        if auc is not None
    ]
    return max((max(auc, 1 - auc) for auc in found), default=0.5)


def leak_remark(auc: float) -> str:
    """Return what to say of a column of such a `leak_auc`; nothing where it may be known before the click."""
    return "" if auc < LEAK_AUC else f"tells the label alone (AUC {auc:.3f})"


def leaks_of(dataset: PreparedDataset) -> list[str]:
    """Return what to say of each column that alone predicts the label, by a sample of held-out rows, or of all."""
    first = dataset.num_train_rows if dataset.num_eval_rows else 0
    parts = [
        part
        for start, stop in sampled_runs(
            dataset.manifest.num_rows - first, at_most=MOST_JUDGED_ROWS, num_runs=JUDGED_RUNS
        )
        for part in dataset.parts(first + start, first + stop)
    ]
    is_click = np.concatenate([first_label(part.labels) for part in parts]).astype(bool)
    schema = dataset.manifest.schema
    # Slots with one id of a row come first.
    columns = {
        name: pa.array(np.concatenate([part.dense[:, index] for part in parts]))
        for index, name in enumerate(schema.numeric_columns)
    } | {
        name: pa.array(np.concatenate([part.ids[:, slot] for part in parts])).cast(pa.string())
        for slot, name in enumerate(schema.categorical_columns)
        if name in schema.text_columns
    }
    remarks = {name: leak_remark(leak_auc(column, is_click)) for name, column in columns.items()}
    return [f"{name} {remark}" for name, remark in remarks.items() if remark]


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


def words_of(name: str) -> list[str]:
    """Return the words of a column's name in lower case: user id, user_id, user.id and userID have two."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def _find_times(name: str, column: pa.Array) -> pa.Array | None:
    """Return a column as times that can be compared, null where missing; None where it holds no times.

    Numbers are times where they look like seconds since 1970, or such in smaller units, or dates in digits, and the
    column is called so or is in order.
    """
    times = comparable_times(column)
    if times is None or times.null_count == len(times):
        return None
    if pa.types.is_timestamp(times.type) or pa.types.is_date(times.type):
        return times
    if not (pa.types.is_integer(times.type) or pa.types.is_floating(times.type)):
        return None
    words = words_of(name)
    is_named = any(word in _TIME_WORDS or word.endswith(_TIME_ENDINGS) for word in words)
    known = times.drop_null()
    numbers = known.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if not _look_like_times(numbers, is_named=is_named):
        return None
    is_in_order = not is_earlier(known).true_count and "id" not in words
    return times if is_named or is_in_order else None


def times_of(columns: Iterable[SampledColumn]) -> dict[str, pa.Array]:
    """Return the columns of times among some by their names."""
    found = {each.name: _find_times(each.name, each.stored) for each in columns if not each.problem}
    return {name: times for name, times in found.items() if times is not None}


def _look_like_times(numbers: npt.NDArray[np.float64], *, is_named: bool) -> bool:
    numbers = np.where(np.isfinite(numbers), numbers, 0.0)
    first, last = _EPOCHS_S
    shares = [np.mean((numbers >= first * unit) & (numbers < last * unit)) for unit in _UNITS_PER_S]
    for digits, divisor in _DAY_DIGITS.items():
        days = numbers // divisor
        shares.append(np.mean((numbers >= 10.0 ** (digits - 1)) & (days < 10**8) & _are_days(days)))
    if is_named:
        # yymmddhh, as in 14102100.
        shares.append(
            np.mean((numbers < 10**8) & (numbers % 100 < 24) & _are_days(numbers // 100 + 20_000_000))
        )
    return bool(max(shares) >= _TIME_SHARE)


def _are_days(days: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Tell of numbers such as 20261101 which are days of the years 1970 to 2100."""
    years, months = days // 10_000, days // 100 % 100
    are_days: npt.NDArray[np.bool_] = (
        (years >= 1970)
        & (years <= 2100)
        & (months >= 1)
        & (months <= 12)
        & (days % 100 >= 1)
        & (days % 100 <= 31)
    )
    return are_days


def best_time_column(columns: Mapping[str, pa.Array]) -> str | None:
    """Return which column of times orders rows: of those without a gap the one most in order, then finest."""
    ranks = {
        name: (_share_out_of_order(times), -len(pc.unique(times)))
        for name, times in columns.items()
        if not times.null_count
    }
    return min(ranks, key=lambda name: ranks[name], default=None)


def _share_out_of_order(times: pa.Array) -> float:
    """Return the share of rows with a time that are earlier than the one before, in [0, 1]."""
    return pc.mean(is_earlier(times.drop_null())).as_py() or 0.0


def order_remark(times: pa.Array, *, orders_rows: bool = True) -> str:
    """Return what to check of a column of times; says so where rows are not in their order."""
    share = _share_out_of_order(times)
    if share > 0.0 and orders_rows:
        return f"rows are not in its order ({share:.0%} are before their neighbour): sort them, the last are held out"
    if times.null_count:
        return (
            f"a time, but {times.null_count / len(times):.1%} of the rows have none, so it cannot order them"
        )
    return "a time: write what matters of it, such as the hour, as a column"
