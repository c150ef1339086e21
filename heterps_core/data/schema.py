"""Which column of a table is the label, which are numbers and which are categories; by default the Criteo format."""

from __future__ import annotations

from dataclasses import dataclass

from heterps_core.errors import ConfigurationError
from heterps_core.json_codec import JsonDocument, JsonForm


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSchema(JsonDocument):
    """How to read a table of labelled rows from CSV, TSV or Parquet."""

    json_form = JsonForm(what="data schema", version=1, is_strict=True)

    name: str
    """Short name of the format, for messages and records."""

    label_column: str

    label_positive: tuple[str, ...] = ("1", "1.0")
    """Texts of the label that mean a click; anything that is in neither list is an error."""

    label_negative: tuple[str, ...] = ("0", "0.0")
    """Texts of the label that mean no click."""

    numeric_columns: tuple[str, ...] = ()
    """Columns read as numbers, in the order of the model's dense input."""

    count_columns: tuple[str, ...] = ()
    """The numeric columns that are counts or amounts over several magnitudes: they enter as a logarithm."""

    categorical_columns: tuple[str, ...]
    """Columns read as text and hashed, in the order of the model's slots; at least one."""

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
        _check_columns(self)
        _check_label_values(self)
        _check_layout(self)

    @property
    def used_columns(self) -> tuple[str, ...]:
        """Label, numeric and categorical columns: all that is read from a file."""
        return (self.label_column, *self.numeric_columns, *self.categorical_columns)

    @property
    def count_flags(self) -> tuple[bool, ...]:
        """For each numeric column whether it is a count."""
        return tuple(column in self.count_columns for column in self.numeric_columns)


def _check_columns(schema: DataSchema) -> None:
    if not schema.categorical_columns:
        raise ConfigurationError("categorical_columns must name at least one column, got none")
    for field, columns in (("column_names", schema.column_names), ("a schema", schema.used_columns)):
        twice = sorted({column for column in columns if columns.count(column) > 1})
        if twice:
            raise ConfigurationError(
                f"{field} must name each column once, but {twice[0]!r} stands there twice"
            )
    no_numbers = sorted(set(schema.count_columns) - set(schema.numeric_columns))
    if no_numbers:
        raise ConfigurationError(f"count_columns must also be numeric_columns, but {no_numbers[0]!r} is not")
    if schema.column_names:
        unnamed = [column for column in schema.used_columns if column not in schema.column_names]
        if unnamed:
            raise ConfigurationError(f"column_names must hold every column in use, but lacks {unnamed[0]!r}")


def _check_label_values(schema: DataSchema) -> None:
    for field, values in (
        ("label_positive", schema.label_positive),
        ("label_negative", schema.label_negative),
    ):
        if not values:
            raise ConfigurationError(f"{field} must hold at least one text, got none")
    both = sorted(set(schema.label_positive) & set(schema.label_negative))
    if both:
        raise ConfigurationError(f"a label cannot be positive and negative at once, but {both[0]!r} is")


def _check_layout(schema: DataSchema) -> None:
    separator = schema.separator
    if separator is not None and (
        not separator or separator[1:].strip(" ") or separator[0] in ' "\r\n' or not separator.isascii()
    ):
        raise ConfigurationError(
            f"separator must be one ASCII character, with blanks after it where fields are padded "
            f'(for instance "," or ", "), got {separator!r}'
        )
    if schema.has_header is False and not schema.column_names:
        raise ConfigurationError("a file without header needs column_names: list all columns in file order")


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
