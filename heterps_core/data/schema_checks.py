"""The rules of a schema, each with the values that break it and the way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from heterps_core.data.features import MIN_SLOT_ROWS
from heterps_core.data.reading.canonical_text import canonical_text
from heterps_core.errors import ConfigurationError

if TYPE_CHECKING:
    from heterps_core.data.schema import DataSchema


def check_schema(schema: DataSchema) -> None:
    """Raise ConfigurationError where a schema breaks a rule."""
    for check in (
        _check_columns,
        _check_histories,
        _check_names,
        _check_fields_of_columns,
        _check_label_values,
        _check_layout,
    ):
        check(schema)


def _check_columns(schema: DataSchema) -> None:
    if bool(schema.label_column) == bool(schema.label_columns):
        raise ConfigurationError(
            f"a schema must name its label_column or several label_columns, got {schema.label_column!r} and "
            f"{list(schema.label_columns)}"
        )
    if not schema.slot_columns:
        raise ConfigurationError(
            "categorical_columns, multi_hot_columns or sequence_columns must name at least one column, got none"
        )


def _check_histories(schema: DataSchema) -> None:
    if schema.history is not None and not schema.history.columns:
        raise ConfigurationError(
            'the columns of a history must name at least one sequence, such as {past_items = "item"}, got none'
        )
    in_rows = sorted(
        {each.name for each in schema.history_columns} & {*schema.used_columns, *schema.time_columns}
    )
    if in_rows:
        raise ConfigurationError(
            f"a sequence of the history must have a name that no column of the rows has, got {in_rows[0]!r} for "
            f'both; give it another one, such as past_{in_rows[0]} = "{in_rows[0]}"'
        )
    for names in schema.histories:
        most = [schema.list_columns[name].max_length for name in names]
        if len(set(most)) > 1:
            found = ", ".join(f"{own} of {name}" for own, name in zip(most, names, strict=True))
            raise ConfigurationError(f"columns of one history must have one max_length, got {found}")


def _check_names(schema: DataSchema) -> None:
    lists = schema.multi_hot_columns + schema.sequence_columns
    not_both = (*schema.target_columns, *(each.name for each in lists))
    for what, columns in (
        ("column_names", schema.column_names),
        ("the columns of numbers", (*not_both, *schema.numeric_columns)),
        ("the columns of categories", (*not_both, *schema.categorical_columns)),
    ):
        twice = sorted({column for column in columns if columns.count(column) > 1})
        if twice:
            raise ConfigurationError(
                f"{what} must name each column once, but {twice[0]!r} stands there twice"
            )
    if schema.column_names:
        needed = (*schema.used_columns, *schema.order_columns)
        unnamed = [column for column in needed if column not in schema.column_names]
        if unnamed:
            raise ConfigurationError(f"column_names must hold every column in use, but lacks {unnamed[0]!r}")


def _check_fields_of_columns(schema: DataSchema) -> None:
    for what in ("table_rows", "dimensions", "tables"):
        no_slots = sorted(set(getattr(schema, what)) - set(schema.slot_columns))
        if no_slots:
            raise ConfigurationError(
                f"{what} must be of categorical, multi-hot or sequence columns, but {no_slots[0]!r} is none; "
                f"leave it out of {what}, or name it in one of these lists"
            )
    for name, rows in schema.table_rows.items():
        if rows < MIN_SLOT_ROWS:
            raise ConfigurationError(
                f"table_rows must be at least {MIN_SLOT_ROWS}, one row for a missing value and one for the others, "
                f"got {rows} for {name!r}"
            )
    no_inputs = sorted(set(schema.request_columns) - {*schema.slot_columns, *schema.numeric_columns})
    if no_inputs or (schema.request_columns and schema.request_column is None):
        raise ConfigurationError(
            f"request_columns must be columns that the model sees, beside a request_column that says which rows are "
            f"of one request, got {', '.join(no_inputs or schema.request_columns)} and request_column "
            f"{schema.request_column!r}; name them in the schema, or leave them out of request_columns"
        )
    no_numbers = sorted(set(schema.count_columns) - set(schema.numeric_columns))
    if no_numbers:
        raise ConfigurationError(f"count_columns must also be numeric_columns, but {no_numbers[0]!r} is not")


def sizes_by_table(schema: DataSchema, field_name: str) -> dict[str, int]:
    """Return the sizes of columns in a field of the schema, with those of other columns of the same tables."""
    sizes: Mapping[str, int] = getattr(schema, field_name)
    tables = {name: schema.tables.get(name, name) for name in schema.slot_columns}
    sized = {tables[name]: name for name in sizes}
    for name, size in sizes.items():
        other = sized[tables[name]]
        if size != sizes[other]:
            raise ConfigurationError(
                f"{field_name} must be equal for all columns of the table {tables[name]!r}, got {size} for {name!r} "
                f"and {sizes[other]} for {other!r}; keep one of the two, or give the columns different tables"
            )
    return {**sizes, **{name: sizes[sized[table]] for name, table in tables.items() if table in sized}}


def _check_label_values(schema: DataSchema) -> None:
    if schema.negative_share == 0.0 or (schema.negative_share < 1.0 and schema.label_columns):
        raise ConfigurationError(
            f"negative_share must be above 0, and 1 with several label_columns, whose clicks it would not leave in "
            f"proportion, got {schema.negative_share} and {list(schema.label_columns)}"
        )
    for what, values in (
        ("label_positive", schema.label_positive),
        ("label_negative", schema.label_negative),
    ):
        if not values:
            raise ConfigurationError(f"{what} must hold at least one text, got none")
    positive, negative = (
        {*texts, *map(canonical_text, texts)} for texts in (schema.label_positive, schema.label_negative)
    )
    # Several texts stand for no value, of which each may be a label.
    both = sorted((positive & negative - {""}) | ({*schema.label_positive} & {*schema.label_negative}))
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
    is_taken = bool(schema.list_columns) and schema.list_separator == (separator or "")[:1]
    if not schema.list_separator or is_taken:
        raise ConfigurationError(
            f"list_separator must be a text that is not the separator of fields, got {schema.list_separator!r}"
        )
    if schema.has_header is False and not schema.column_names:
        raise ConfigurationError("a file without header needs column_names: list all columns in file order")
