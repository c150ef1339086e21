"""Which column of a table is the label, which are numbers and which are categories; by default the Criteo format."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from heterps_core.data.features import (
    BUCKET_ROWS,
    MEAN,
    POOLINGS,
    SEQUENCE,
    SUM,
    TEXT_RULE,
    DynamicIds,
    FeatureSpec,
)
from heterps_core.data.schema_checks import check_schema, sizes_by_table
from heterps_core.errors import UnknownNameError
from heterps_core.field_rules import Fraction, count
from heterps_core.json_codec import JsonDocument, JsonForm
from heterps_core.toml_file import SCHEMA_TABLE

MAX_LIST_LENGTH = 8_192
"""Most values of a row; each value of the longest multi-hot list takes 4 bytes of every row in memory."""


MAX_TABLE_ROWS = 2**31 - 1
"""Ids are 32-bit numbers."""

MAX_DIMENSION = 4_096


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiHotColumn(JsonDocument):
    """A column of any number of categories in each row, in no order: Arrow lists, or a text with a separator."""

    json_form = JsonForm(is_strict=True)

    name: str
    max_length: Annotated[int, count(MAX_LIST_LENGTH)] = 20
    """The first values of a longer list are used."""

    pooling: str = MEAN
    """How the vectors of a row's values are combined, one of `POOLINGS`."""

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise UnknownNameError("pooling", self.pooling, POOLINGS)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceColumn(JsonDocument):
    """A column of categories in the order of time; of a row with more values than are used the last ones count."""

    json_form = JsonForm(is_strict=True)

    name: str
    max_length: Annotated[int, count(MAX_LIST_LENGTH)] = 20

    history: str = ""
    """Columns with one name here hold what happened in the same events, such as item and action: in each row as many
    values, of which a missing one keeps its place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventHistory(JsonDocument):
    """Sequences that are not in the rows: of each row the last events of its key before its time, see `history/`."""

    json_form = JsonForm(is_strict=True)

    table: str
    """Parquet files (file, folder or pattern, here or in a bucket) or a table (delta://, iceberg://) of events."""

    key: str
    """Column of rows and events, such as a user: texts or numbers."""

    time: str
    """Column of rows and events: dates, times or numbers, the same in both. A row sees the events strictly before
    its own; events of one time are in the order of their columns' values."""

    columns: Mapping[str, str]
    """For each sequence of the model the column of the events that its values are from."""

    max_length: Annotated[int, count(MAX_LIST_LENGTH)] = 20
    """Most events of a row: the last ones."""


LAYOUT_FIELDS = ("column_names", "separator", "has_header")
"""Fields of a schema that say how the fields of a text file lie, not their meaning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSchema(JsonDocument):
    """How to read a table of labelled rows from CSV, TSV or Parquet."""

    json_form = JsonForm(what="data schema", version=1, is_strict=True, toml_table=SCHEMA_TABLE)

    name: str
    label_column: str = ""

    label_positive: tuple[str, ...] = ("1", "1.0")
    """Texts of the label, in any form, that mean a click; anything that is in neither list is an error."""

    label_negative: tuple[str, ...] = ("0", "0.0")
    label_columns: tuple[str, ...] = ()
    """In place of `label_column`, where a model learns several labels, each with a logit of its own; models are
    compared by the first."""

    weight_column: str | None = None
    """Finite numbers, at least 0: what each row counts for, in training and in quality. None: all count alike."""

    negative_share: Fraction = 1.0
    """Share of the rows without a click to train on, above 0. All held-out rows count, and predictions are corrected
    for the share; see `logit_shift`."""

    time_column: str | None = None
    """Numbers or times by which the rows must be in order, as the latest are held out; the model does not see them
    where no other list names them."""

    request_column: str | None = None
    """Which request a row is of, where several candidates were shown together: rows of a request follow one another
    in one file, and are trained on or held out together. The model does not see it where no other list names it."""

    request_columns: tuple[str, ...] = ()
    """Columns that are equal in all rows of a request, such as the user's: sequences among them are worked out once a
    request by models that read sequences in order."""

    numeric_columns: tuple[str, ...] = ()
    """Columns read as numbers, in the order of the model's dense input."""

    count_columns: tuple[str, ...] = ()
    """The numeric columns that are counts or amounts over several magnitudes: they enter as a logarithm."""

    categorical_columns: tuple[str, ...] = ()
    """Columns read as text and hashed, in the order of the model's slots. A numeric column may stand here, too: each
    of its numbers then has a vector of its own, which helps where few numbers occur often, such as ages."""

    multi_hot_columns: tuple[MultiHotColumn, ...] = ()
    """Columns of lists of such texts, the slots after the categorical ones."""

    sequence_columns: tuple[SequenceColumn, ...] = ()
    """Columns of sequences of such texts, the last slots; of all three kinds there is at least one. A model that does
    not ask for the order averages their vectors."""

    history: EventHistory | None = None
    """More sequences, the last slots, joined to the rows while these are read."""

    table_rows: Mapping[str, Annotated[int, count(MAX_TABLE_ROWS)]] = field(default_factory=dict)
    """Rows of the embedding table by the column; those of other columns follow the values that the data shows."""

    dynamic_ids: DynamicIds | None = None
    """None hashes values to rows, so that some share one; otherwise each value has a row of its own, and tables of
    columns without `table_rows` grow with the number of values."""

    dimensions: Mapping[str, Annotated[int, count(MAX_DIMENSION)]] = field(default_factory=dict)
    """Values of an embedding vector by the column; those of other columns are the model's own."""

    tables: Mapping[str, str] = field(default_factory=dict)
    """The table that a column looks up; a column that is not named here has one of its own name. Columns of one table
    share its rows, what they learn and their sizes, which it is enough to give for one of them."""

    list_separator: str = "|"
    """Between the values of a list in a field of text."""

    column_names: tuple[str, ...] = ()
    """All columns of a text file without header, in file order; empty where every file has a header."""

    separator: str | None = None
    """Text between two fields: one character, or one character and blanks (then blanks around fields
    are dropped). None: tab or comma, whichever the first line holds more often."""

    has_header: bool | None = None
    """Whether text files start with a line of names. None: they do where the first line names columns."""

    missing_markers: tuple[str, ...] = ()
    """Texts that mean "no value", besides the empty field, which always does."""

    def __post_init__(self) -> None:
        check_schema(self)
        for field_name in ("table_rows", "dimensions"):
            object.__setattr__(self, field_name, sizes_by_table(self, field_name))

    @property
    def used_columns(self) -> tuple[str, ...]:
        """All columns that are read from a file, each once: label, weight, numeric and categorical columns, and those
        that point to a history."""
        columns = (*self.target_columns, *self.numeric_columns, *self.text_columns, *self.pointer_columns)
        return tuple(dict.fromkeys(columns))

    @property
    def pointer_columns(self) -> tuple[str, ...]:
        """Key and time of a row, which its history is found by; none without a history."""
        return () if self.history is None else (self.history.key, self.history.time)

    @property
    def history_columns(self) -> tuple[SequenceColumn, ...]:
        """The sequences that are read from a table of events."""
        history = self.history
        return (
            ()
            if history is None
            else tuple(
                SequenceColumn(name=name, max_length=history.max_length, history="schema.history")
                for name in history.columns
            )
        )

    @property
    def slot_columns(self) -> tuple[str, ...]:
        """The columns that embeddings are looked up for, in the order of the model's slots."""
        return (
            *self.categorical_columns,
            *self.list_columns,
        )

    @property
    def row_slots(self) -> tuple[str, ...]:
        """The slot columns that stand in the rows: the first ones, all but those of a history."""
        return self.slot_columns[: len(self.slot_columns) - len(self.history_columns)]

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The columns of rows that are read as texts: the categories of numbers are made of the numbers."""
        return tuple(name for name in self.row_slots if name not in self.numeric_columns)

    @property
    def slot_tables(self) -> tuple[int, ...]:
        """For each slot the first slot that looks up the same table."""
        tables = [self.tables.get(name, name) for name in self.slot_columns]
        return tuple(map(tables.index, tables))

    @property
    def feature_columns(self) -> tuple[str, ...]:
        """Columns of rows that a model reads."""
        return tuple(dict.fromkeys((*self.numeric_columns, *self.row_slots)))

    @property
    def target_columns(self) -> tuple[str, ...]:
        """Label and weight columns, which predictions are measured by."""
        return (*self.labels, *self.weight_columns)

    @property
    def labels(self) -> tuple[str, ...]:
        """The label columns, at least one."""
        return self.label_columns or (self.label_column,)

    @property
    def weight_columns(self) -> tuple[str, ...]:
        """The weight column, or none."""
        return () if self.weight_column is None else (self.weight_column,)

    @property
    def time_columns(self) -> tuple[str, ...]:
        """The column of times, or none."""
        return () if self.time_column is None else (self.time_column,)

    @property
    def order_columns(self) -> tuple[str, ...]:
        """The columns that rows are in order by, time and request, which are read once while rows are prepared."""
        return self.time_columns if self.request_column is None else (*self.time_columns, self.request_column)

    @property
    def request_weight(self) -> float | None:
        """What rows of a request without a click count for where others are left out; None: all count alike."""
        if self.request_column is None or self.negative_share == 1.0:
            return None
        return 1.0 / self.negative_share

    @property
    def has_weights(self) -> bool:
        """Whether rows count for more or less than others."""
        return self.weight_column is not None or self.request_weight is not None

    @property
    def number_columns(self) -> tuple[str, ...]:
        """All columns that must hold numbers."""
        return (*self.weight_columns, *self.numeric_columns)

    @property
    def is_padded(self) -> bool:
        """Whether the separator announces blanks around fields, which are dropped."""
        return len(self.separator or "") > 1

    @property
    def list_columns(self) -> dict[str, MultiHotColumn | SequenceColumn]:
        """The columns of lists and sequences by their names, in the order of slots."""
        columns: tuple[MultiHotColumn | SequenceColumn, ...] = (
            *self.multi_hot_columns,
            *self.sequence_columns,
            *self.history_columns,
        )
        return {column.name: column for column in columns}

    @property
    def slot_histories(self) -> tuple[int, ...]:
        """For each slot the first slot with values of the same events."""
        columns = (*self.sequence_columns, *self.history_columns)
        histories = {each.name: each.history for each in columns if each.history}
        names = [histories.get(name, (name,)) for name in self.slot_columns]
        return tuple(map(names.index, names))

    @property
    def histories(self) -> tuple[tuple[str, ...], ...]:
        """Columns that hold values of the same events, two or more each."""
        of_slots = dict(zip(self.slot_columns, self.slot_histories, strict=True))
        by_history = (
            tuple(name for name, own in of_slots.items() if own == history)
            for history in dict.fromkeys(self.slot_histories)
        )
        return tuple(names for names in by_history if len(names) > 1)

    def features(self, slot_rows: Sequence[int], *, text_rule: int = TEXT_RULE) -> FeatureSpec:
        """Return the shape of a model's input, with a table of so many rows for each slot that is given none.

        A table that several slots share has the rows of the one with most.
        """
        num_single = len(self.categorical_columns)
        multiple = 1 if self.dynamic_ids is None else BUCKET_ROWS
        rows_of_tables: dict[int, int] = {}
        for table, name, rows in zip(self.slot_tables, self.slot_columns, slot_rows, strict=True):
            own = self.table_rows.get(name, rows)
            rows_of_tables[table] = max(rows_of_tables.get(table, 0), -(-own // multiple) * multiple)
        return FeatureSpec(
            num_dense=len(self.numeric_columns),
            num_labels=len(self.labels),
            dynamic_ids=self.dynamic_ids,
            text_rule=text_rule,
            slot_rows=tuple(rows_of_tables[table] for table in self.slot_tables),
            slot_tables=self.slot_tables,
            slot_histories=self.slot_histories,
            slot_dimensions=tuple(map(self.dimensions.get, self.slot_columns)),
            slot_names=self.slot_columns,
            dense_names=self.numeric_columns,
            slot_lengths=(1,) * num_single + tuple(each.max_length for each in self.list_columns.values()),
            slot_poolings=(
                *(SUM,) * num_single,
                *(column.pooling for column in self.multi_hot_columns),
                *(SEQUENCE,) * len(self.sequence_columns + self.history_columns),
            ),
        )

    @property
    def logit_shift(self) -> float:
        r"""What is added to a trained model's logits, as rows without a click were left out of its training.

        Where a share s of them stays, the odds of a click are 1 / s times those of all rows:
        :math:`\mathrm{logit}\, p = \mathrm{logit}\, p_s + \log s`. Of requests those that stay count for the others.
        """
        return 0.0 if self.request_column else math.log(self.negative_share)

    @property
    def meaning(self) -> str:
        """Return a hash of all that decides what a row means to a model's weights.

        The schema's name, the order of rows and the layout of files are not part of it.
        """
        document = self.to_json()
        for name in ("name", "time_column", "request_columns", *LAYOUT_FIELDS):
            document.pop(name, None)
        for column in document["sequence_columns"]:
            if not column["history"]:
                del column["history"]
        if self.request_weight is None:
            del document["request_column"]
        for name in ("tables", "history"):
            # As the hashes of registered models, which know neither.
            if not document[name]:
                del document[name]
        document.get("history", {}).pop("table", None)
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    @property
    def count_flags(self) -> tuple[bool, ...]:
        """For each numeric column whether it is a count."""
        return tuple(column in self.count_columns for column in self.numeric_columns)


_COUNTS = tuple(f"I{i}" for i in range(1, 14))
_CATEGORIES = tuple(f"C{i}" for i in range(1, 27))

CRITEO_SCHEMA = DataSchema(
    name="criteo",
    label_column="label",
    numeric_columns=_COUNTS,
    count_columns=_COUNTS,
    categorical_columns=_CATEGORIES,
    column_names=("label", *_COUNTS, *_CATEGORIES),
)
"""Criteo display advertising: 40 tab-separated columns without header as published (Kaggle, 2014), or
a CSV or Parquet file with the usual names label, I1..I13, C1..C26."""
