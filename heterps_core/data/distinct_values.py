"""How many different values each categorical column has, and how many rows its table should have for them.

Values are counted over a sample of rows in bounded memory. Up to `MOST_KEPT` values are counted one by one; then only
those whose hash lies in the lower half of what was kept so far (adaptive sampling: Flajolet, "On adaptive sampling",
Computing 43, 1990). What is kept is a random choice of values, whatever the order of the rows: their number times
2^level estimates that of all, 0.5 % off in the mean, and how often they occur is how often all do.

Tables are filled by a hash, so of V values in b buckets each shares its bucket with probability
1 - (1 - 1/b)^(V - 1), and b (1 - (1 - 1/b)^V) buckets are in use; the larger V / b, the more values learn one vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heterps_core.data.features import MIN_SLOT_ROWS
from heterps_core.data.hashing import UInt64Array, hash_texts, text_lengths
from heterps_core.data.reading.column_texts import canonical_texts
from heterps_core.json_codec import JsonDocument
from heterps_core.text_table import Table

MOST_KEPT = 65_536

MIN_TABLE_ROWS, MAX_TABLE_ROWS = 1_024, 131_072

_ROWS_PER_BUCKET = 8
"""A bucket that is hardly ever seen learns nothing: rare values share theirs. With sixteen, AUC of synthetic clicks
with six columns by Zipf's law was lower by 0.004 (docs/log, 2026-11-22)."""

_BUCKETS_PER_VALUE = 4
"""Then 12 to 22 % of the values share a bucket with another, as the power of two is near. On synthetic clicks AUC was
as with twice as many rows; with half or a quarter it was lower by 0.0002 and 0.0007 (docs/log, 2026-11-22)."""

_OUTGROWN = 4
"""Tables this many times smaller than new ones would be are worth a word; days differ by less."""

_TABLE_COLUMNS = {
    "column": "",
    "values": ",d",
    "missing": ".1%",
    "table rows": ",d",
    "rows in use": ".0%",
    "values that share a row": ".0%",
}

_TURNOVER_COLUMNS = {
    "column": "",
    "table rows": ",d",
    "ids": ",d",
    "rows in use": ".0%",
    "ids with a row": ",d",
    "admitted": ",d",
    "evicted": ",d",
}

_HASH_BITS = 64


class ValueCounter:
    """Counts the different values of one column, and how often each occurs.

    Attributes:
        num_rows: Counted rows, rows without a value included.
        num_missing: Counted rows without a value.
        num_occurrences: Values of all rows together, which are more than rows where these hold lists.
    """

    def __init__(self) -> None:
        self.num_rows = self.num_missing = self.num_occurrences = 0
        self._hashes: UInt64Array = np.zeros(0, dtype=np.uint64)
        self._counts: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._level = 0

    def add(self, texts: pa.StringArray | pa.DictionaryArray | pa.ListArray) -> None:
        """Count the values of some rows [n], texts or lists of texts; null and empty are missing."""
        is_list = pa.types.is_list(texts.type)
        values = texts.flatten() if is_list else texts
        if not pa.types.is_dictionary(values.type):
            values = values.dictionary_encode()
        counts = np.bincount(values.indices.drop_null().to_numpy(), minlength=len(values.dictionary))
        used = np.flatnonzero(counts)
        different = canonical_texts(values.dictionary.take(pa.array(used)))
        is_there = text_lengths(different) > 0
        counts = counts[used][is_there]
        num_there = int(counts.sum())
        num_present = pc.greater(pc.list_value_length(texts), 0).true_count if is_list else num_there
        self.num_rows += len(texts)
        self.num_missing += len(texts) - num_present
        self.num_occurrences += num_there
        self._take(hash_texts(different.filter(pa.array(is_there)), slot=0), counts)

    @property
    def num_values(self) -> int:
        """Different values of the counted rows: exact up to `MOST_KEPT`, an estimate above."""
        return len(self._hashes) << self._level

    def expected_values(self, num_rows: int) -> int:
        """Return the different values to expect of so many rows, of which the counted ones are a sample.

        With f1 values that occur once in n sampled rows and f2 twice, about f0 = f1 (f1 - 1) / (2 (f2 + 1)) have not
        been seen (Chao, Scandinavian Journal of Statistics 11, 1984), of which m rows more show
        f0 (1 - (1 - f1 / (n f0 + f1))^m) (Colwell et al., Journal of Plant Ecology 5, 2012). Far beyond the sample
        this is a lower bound.
        """
        n = self.num_occurrences
        once, twice = (int((self._counts == times).sum()) << self._level for times in (1, 2))
        unseen = once * (once - 1) / (2 * (twice + 1))
        if num_rows <= self.num_rows or unseen == 0:
            return self.num_values
        more = n * (num_rows / self.num_rows - 1)
        return self.num_values + round(unseen * -math.expm1(more * math.log1p(-once / (n * unseen + once))))

    def column(self, name: str, *, num_rows: int) -> ColumnValues:
        """Return the estimated values of the column in `num_rows` rows."""
        num_present = self.num_rows - self.num_missing
        return ColumnValues(
            name=name,
            missing_share=self.num_missing / self.num_rows,
            num_values=self.expected_values(num_rows),
            mean_length=self.num_occurrences / num_present if num_present else 1.0,
        )

    def _take(self, hashes: UInt64Array, counts: npt.NDArray[np.int64]) -> None:
        hashes, counts = np.concatenate([self._hashes, hashes]), np.concatenate([self._counts, counts])
        while True:
            kept = hashes <= np.uint64((1 << _HASH_BITS - self._level) - 1)
            self._hashes, number = np.unique(hashes[kept], return_inverse=True)
            self._counts = np.zeros(len(self._hashes), dtype=np.int64)
            np.add.at(self._counts, number, counts[kept])
            if len(self._hashes) <= MOST_KEPT:
                return
            self._level += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnValues:
    """The values of a categorical column in the training rows."""

    name: str
    missing_share: float
    """Share of the rows without a value, in [0, 1]."""

    num_values: int
    """Different values in all rows; estimated where a sample was counted."""

    mean_length: float = 1.0
    """Values of a row that has any, in the mean: more than 1 in lists only."""

    def table_rows(self, num_rows: int) -> int:
        """Return the rows of a new table for so many rows of data: a power of two, in fixed limits.

        `_BUCKETS_PER_VALUE` for each value, but no more than `_ROWS_PER_BUCKET` occurrences fill each.

        Example:
            >>> country = ColumnValues(name="country", missing_share=0.0, num_values=1_500)
            >>> user = ColumnValues(name="user", missing_share=0.5, num_values=40_000)
            >>> country.table_rows(10**6), user.table_rows(200_000)
            (8192, 8192)
        """
        wanted = 1 << (_BUCKETS_PER_VALUE * self.num_values - 1).bit_length() if self.num_values else 1
        num_occurrences = int(num_rows * (1.0 - self.missing_share) * self.mean_length)
        filled = max(1, num_occurrences // _ROWS_PER_BUCKET)
        return min(max(min(wanted, 1 << (filled.bit_length() - 1)), MIN_TABLE_ROWS), MAX_TABLE_ROWS)

    @property
    def dynamic_rows(self) -> int:
        """Rows of a new table in which each value has one: half of them are in use."""
        return max(2 * self.num_values, MIN_SLOT_ROWS)

    def sharing_share(self, table_rows: int) -> float:
        """Return the share of values, in [0, 1], that share their row with another in a table of so many rows."""
        return 1.0 - _free_share(table_rows, max(self.num_values - 1, 0))

    def used_share(self, table_rows: int) -> float:
        """Return the share of the rows of such a table that values fall into."""
        return 1.0 - _free_share(table_rows, self.num_values)


def _free_share(table_rows: int, num_values: int) -> float:
    """Return the probability that none of some values falls into one bucket; row 0 is for missing ones."""
    return float((1.0 - 1.0 / (table_rows - 1)) ** num_values)


def tables_table(
    columns: Sequence[ColumnValues], table_rows: Sequence[int], *, has_dynamic_ids: bool = False
) -> Table:
    """Return for people which column has how many values in how many rows, and how many of them collide."""
    return Table(
        caption="Categorical columns and their tables; values that share a row share its vector",
        columns=_TABLE_COLUMNS,
        rows=[
            (
                column.name,
                column.num_values,
                column.missing_share,
                rows,
                min(column.num_values / rows, 1.0) if has_dynamic_ids else column.used_share(rows),
                0.0 if has_dynamic_ids else column.sharing_share(rows),
            )
            for column, rows in zip(columns, table_rows, strict=True)
        ],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class IdTurnover(JsonDocument):
    """How a night changed the ids of a column, in the table with most of them."""

    column: str
    table_rows: int
    num_ids: int
    """Ids that stay."""

    num_with_row: int
    """Ids that stay and were seen often enough for a row of their own."""

    num_admitted: int
    num_evicted: int

    @property
    def share_in_use(self) -> float:
        """Share of the rows that ids have, in [0, 1]."""
        return self.num_ids / self.table_rows


def turnover_table(turnovers: Sequence[IdTurnover]) -> Table:
    """Return for people how full the tables of dynamic ids are, and which ids came and went."""
    return Table(
        caption="Ids of categorical columns after this night; each gets a row of its own once it was seen often",
        columns=_TURNOVER_COLUMNS,
        rows=[
            (
                of.column,
                of.table_rows,
                of.num_ids,
                of.share_in_use,
                of.num_with_row,
                of.num_admitted,
                of.num_evicted,
            )
            for of in turnovers
        ],
    )


def turnover_summary(turnovers: Sequence[IdTurnover]) -> str:
    """Return the same of all columns together in one line."""
    num_rows = sum(turnover.table_rows for turnover in turnovers)
    return (
        f"ids have {sum(turnover.num_ids for turnover in turnovers) / num_rows:.0%} of {num_rows:,} rows; this night "
        f"{sum(turnover.num_admitted for turnover in turnovers):,} got a row of their own, and "
        f"{sum(turnover.num_evicted for turnover in turnovers):,} that were not seen for long went"
    )


def outgrown_tables(
    columns: Sequence[ColumnValues], table_rows: Sequence[int], *, num_rows: int
) -> str | None:
    """Return for people which columns have outgrown their tables, and the fix; None where none has."""
    outgrown = [
        f"{column.name} has {rows:,} rows and would get {column.table_rows(num_rows):,}"
        for column, rows in zip(columns, table_rows, strict=True)
        if column.table_rows(num_rows) >= _OUTGROWN * rows
    ]
    if not outgrown:
        return None
    return (
        f"the champion's tables are kept, but {len(outgrown)} of {len(columns)} columns have outgrown theirs: "
        f"{'; '.join(outgrown)}; start_from=scratch trains a model with new ones, which have fewer collisions"
    )
