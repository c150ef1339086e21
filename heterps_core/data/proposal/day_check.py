"""Holds the rows of a new day against those of the day before: what changed more than days do by themselves.

Both are read by the schema, their first rows alone. A shift of a column is measured by the population stability index
sum((p - q) ln(p / q)) over the deciles of the day before, or its most frequent values; from 0.25 on it is customarily
called significant (Siddiqi, Credit Risk Scorecards, 2006).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heterps_core.data.proposal.column_checks import leak_auc, leak_remark
from heterps_core.data.proposal.table_sample import SAMPLED_ROWS
from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.data.reading.column_texts import canonical_texts, column_texts
from heterps_core.data.reading.readers import read_rows
from heterps_core.data.reading.row_batch import first_label, is_list, shown_name
from heterps_core.data.schema import DataSchema
from heterps_core.text_table import Table

MAX_SHIFT = 0.25
"""Largest usual index."""

MORE_MISSING = 0.1
"""A larger increase of the share of rows without a value is reported."""

MORE_NEW = 0.25
"""A larger share of values that the day before did not have is reported, above the share that its second half had
and its first did not."""

CLICK_RATIO, CLICK_ERRORS = 1.25, 4.0
"""A share of clicks that changes by this factor, and by as many standard errors, is reported."""

MOST_VALUES = 20
"""The most frequent values of a column are compared one by one; all others count as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedColumn:
    """A column of the new day; figures that need the day before are None without it."""

    name: str
    num_values: int
    missing_share: float
    missing_before: float | None = None
    new_share: float | None = None
    """Share of the values that the day before did not have; also None for numbers."""

    shift: float | None = None
    """The population stability index."""

    remark: str = ""
    """What to check; empty where nothing is unusual."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DayCheck:
    """The findings of a new day."""

    num_rows: int
    """Rows that were read, at most `SAMPLED_ROWS`."""

    click_share: float
    click_share_before: float | None
    columns: Sequence[CheckedColumn]
    general: Sequence[str]
    """What to check of clicks."""

    @property
    def findings(self) -> list[str]:
        """A sentence for each unusual finding."""
        return [
            *self.general,
            *(f"{shown_name(each.name)} {each.remark}" for each in self.columns if each.remark),
        ]

    def table(self) -> Table:
        """Return a row for each column."""
        columns = {
            "column": "",
            "values": ",d",
            "missing": ".1%",
            "before": ".1%",
            "new values": ".1%",
            "shift": ".2f",
            "check": "",
        }
        rows = [(shown_name(each.name), *astuple(each)[1:]) for each in self.columns]
        return Table(columns=columns, rows=rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Column:
    """A column of a sample: numbers [n] with NaN where missing, or the values of both halves and how often each."""

    missing_share: float
    numbers: npt.NDArray[np.float64] | None = None
    halves: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    leak_auc: float = 0.5

    @property
    def counts(self) -> Counter[str]:
        return self.halves[0] + self.halves[1]

    @property
    def num_values(self) -> int:
        if self.numbers is None:
            return len(self.counts)
        return len(np.unique(self.numbers[~np.isnan(self.numbers)]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    clicks: npt.NDArray[np.uint8]
    columns: dict[str, _Column]


def check_day(
    files: Sequence[SourcePath], schema: DataSchema, *, before: Sequence[SourcePath] = ()
) -> DayCheck:
    """Check the first rows of a day, beside those of the day before where its files are given.

    Raises:
        DataError: A file cannot be read or breaks the schema; with file, line and what was expected.
    """
    today, earlier = _read(files, schema), _read(before, schema) if before else None
    columns = [
        _checked(name, column, None if earlier is None else earlier.columns[name])
        for name, column in today.columns.items()
    ]
    share = float(today.clicks.mean())
    share_before = None if earlier is None else float(earlier.clicks.mean())
    general = [f"{schema.labels[0]} is the same in all rows"] if share in (0.0, 1.0) else []
    if earlier is not None and share_before is not None and not general:
        error = math.sqrt(
            sum(each.mean() * (1 - each.mean()) / len(each) for each in (today.clicks, earlier.clicks))
        )
        low, high = sorted((share, share_before))
        if high > CLICK_RATIO * low and high - low > CLICK_ERRORS * error:
            general.append(
                f"{schema.labels[0]}: {share:.2%} of the rows are clicks, {share_before:.2%} before"
            )
    return DayCheck(
        num_rows=len(today.clicks),
        click_share=share,
        click_share_before=share_before,
        columns=columns,
        general=general,
    )


def _read(files: Sequence[SourcePath], schema: DataSchema) -> _Sample:
    batches, num_rows = [], 0
    for batch in read_rows(files, schema):
        batches.append(batch)
        num_rows += len(batch.labels)
        if num_rows >= SAMPLED_ROWS:
            break
    numbers = np.concatenate([batch.numbers for batch in batches])
    clicks = np.concatenate([first_label(batch.labels) for batch in batches])
    columns = {
        name: _Column(
            missing_share=float(np.isnan(numbers[:, index]).mean()),
            numbers=numbers[:, index],
            leak_auc=leak_auc(pa.array(numbers[:, index], from_pandas=True), clicks > 0),
        )
        for index, name in enumerate(schema.numeric_columns)
    }
    for index, name in enumerate(schema.row_slots):
        if name in columns:
            continue
        halves, num_missing, num_left = (Counter[str](), Counter[str]()), 0, num_rows // 2
        for batch in batches:
            texts = batch.texts[index]
            # The middle of all rows may lie within a batch.
            for half, part in zip(halves, (texts[:num_left], texts[num_left:]), strict=True):
                values, missing = _values(part)
                half.update(values)
                num_missing += missing
            num_left = max(num_left - len(texts), 0)
        auc = 0.5
        if name not in schema.list_columns:
            texts = pa.concat_arrays([column_texts(batch.texts[index]) for batch in batches])
            auc = leak_auc(texts, clicks > 0)
        columns[name] = _Column(missing_share=num_missing / num_rows, halves=halves, leak_auc=auc)
    return _Sample(clicks=clicks, columns=columns)


def _values(texts: pa.Array) -> tuple[dict[str, int], int]:
    """Return how often each value occurs in some rows, and how many rows have none."""
    num_empty = 0
    if is_list(texts.type):
        num_empty = pc.equal(pc.fill_null(pc.list_value_length(texts), 0), 0).true_count
        texts = texts.flatten()
    occurrences = pc.value_counts(column_texts(canonical_texts(texts))).to_pylist()
    counts = {each["values"]: each["counts"] for each in occurrences}
    num_missing = counts.pop(None, 0) + counts.pop("", 0)
    return counts, num_empty or num_missing


def _checked(name: str, today: _Column, before: _Column | None) -> CheckedColumn:
    remarks = []
    missing_before = new_share = shift = None
    if today.num_values < 2 and (before is None or before.num_values > 1):
        remarks.append("has one value at most")
    if leak := leak_remark(today.leak_auc):
        remarks.append(leak)
    if before is not None:
        missing_before, shift = before.missing_share, _shift(today, before)
        if today.missing_share > missing_before + MORE_MISSING:
            remarks.append(
                f"is missing in {today.missing_share:.0%} of the rows, {missing_before:.0%} before"
            )
        if today.numbers is None:
            new_share = _new_share(today.counts, before.counts)
            usual = _new_share(before.halves[1], before.halves[0])
            if new_share > usual + MORE_NEW:
                remarks.append(f"has {new_share:.0%} values that are new, {usual:.0%} are usual")
            gone = _new_share(before.counts, today.counts)
            if gone > _new_share(before.halves[0], before.halves[1]) + MORE_NEW:
                remarks.append(f"lacks values that {gone:.0%} of those before were")
        if shift > MAX_SHIFT and not remarks:
            remarks.append(
                f"is distributed otherwise than before (index {shift:.2f}, usual are up to {MAX_SHIFT})"
            )
    return CheckedColumn(
        name=name,
        missing_share=today.missing_share,
        num_values=today.num_values,
        missing_before=missing_before,
        new_share=new_share,
        shift=shift,
        remark="; ".join(remarks),
    )


def _new_share(counts: Counter[str], known: Counter[str]) -> float:
    total = counts.total()
    return sum(count for value, count in counts.items() if value not in known) / total if total else 0.0


def _shift(today: _Column, before: _Column) -> float:
    """Return the population stability index of a column's values, those that are missing left out."""
    if before.numbers is None or today.numbers is None:
        # Values that come and go are reported by their shares.
        shared = today.counts.keys() & before.counts.keys()
        kept = [
            Counter({value: counts[value] for value in shared}) for counts in (today.counts, before.counts)
        ]
        common = [value for value, _ in kept[1].most_common(MOST_VALUES)]
        of_both = [
            [*(counts[value] for value in common), counts.total() - sum(counts[value] for value in common)]
            for counts in kept
        ]
    else:
        known = before.numbers[~np.isnan(before.numbers)]
        edges = np.unique(np.quantile(known, np.linspace(0.1, 0.9, 9))) if len(known) else np.zeros(0)
        # A value that is frequent is an edge; it falls into the part below.
        of_both = [
            np.bincount(
                np.searchsorted(edges, each[~np.isnan(each)], side="left"), minlength=len(edges) + 1
            ).tolist()
            for each in (today.numbers, before.numbers)
        ]
    p, q = ((np.array(counts) + 0.5) / (sum(counts) + 0.5 * len(counts)) for counts in of_both)
    return float(np.sum((p - q) * np.log(p / q)))
