"""Proposes a schema for a table that was never seen: what each column looks like in a sample of rows, and its role.

A person is to check it: whether a whole number counts something or names something cannot be seen in the data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

import pyarrow as pa
import pyarrow.compute as pc

from heterps_core.data.proposal.column_checks import best_time_column, times_of
from heterps_core.data.proposal.column_roles import (
    CATEGORICAL,
    COUNT,
    LEFT_OUT,
    MULTI_HOT,
    NUMERIC,
    SeenColumn,
    label_column,
    seen_column,
)
from heterps_core.data.proposal.table_sample import SAMPLED_ROWS, SampledColumn, TableSample, sample_table
from heterps_core.data.reading.arrow_errors import ARROW_ERRORS
from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.data.reading.canonical_text import canonical_text
from heterps_core.data.reading.column_texts import canonical_texts
from heterps_core.data.reading.readers import check_columns, read_rows
from heterps_core.data.reading.row_batch import is_list, shown_name
from heterps_core.data.reading.tables.table_path import TablePath
from heterps_core.data.schema import DataSchema, MultiHotColumn
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.text_table import Table

LABEL_NAMES = ("label", "click", "clicked", "is_click", "is_clicked", "target", "converted", "y")
_WITH_TABLES, _SHARED_VALUES = (CATEGORICAL, MULTI_HOT), 50
"""Fewer different values may be equal by chance, such as small numbers."""

POSITIVE_TEXTS = ("1", "1.0", "true", "yes", "y", "t", "click", "clicked")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposedSchema:
    """A schema for a person to check, and what it was made from."""

    schema: DataSchema
    columns: Sequence[SeenColumn]
    num_rows: int
    """Rows of the sample."""

    click_share: float
    """Share of clicks among the rows of the sample."""

    def table(self) -> Table:
        """Return what was seen, with the table rows that so many rows of data would get."""
        return Table(
            columns={
                "column": "",
                "type": "",
                "role": "",
                "missing": ".1%",
                "values": ",d",
                "table rows": ",d",
                "check": "",
            },
            rows=[
                (
                    shown_name(seen.values.name),
                    seen.type,
                    f"{seen.role}, {CATEGORICAL}" if seen.is_number_and_category else seen.role,
                    seen.values.missing_share,
                    seen.values.num_values,
                    seen.values.table_rows(self.num_rows) if seen.has_table else None,
                    seen.remark,
                )
                for seen in self.columns
            ],
        )


def propose_schema(
    file: SourcePath,
    *,
    source: str,
    label: str | None = None,
    column_names: Sequence[str] = (),
    separator: str | None = None,
) -> ProposedSchema:
    """Look at the first rows of a file and propose a schema.

    Args:
        file: Parquet, or text with a header, plain or gzip; here or in a bucket.
        source: File or folder as its user names it, whose last part names the schema.
        label: Name of the label column; None for one that is called as labels are.
        column_names: Of a text without a header, all of them in order.
        separator: Of the fields of a text; None for the one that its first line has most of.

    Raises:
        DataError: The file cannot be read, has no header, or no column that can be the label or a category.
        ConfigurationError: There is no column of the name `label`.
    """
    sample = sample_table(
        file, column_names, separator=separator, known_names=(*LABEL_NAMES, (label or "").lower())
    )
    labels = _label_of(file, sample, label)
    positive, negative = _label_texts(file, labels)
    is_click = pc.is_in(labels.texts, pa.array(positive)).to_numpy(zero_copy_only=False)
    times = times_of(each for each in sample.columns if each is not labels)
    time_column = best_time_column(times)
    columns = [
        label_column(each) if each is labels else seen_column(each, is_click, times, time_column=time_column)
        for each in sample.columns
    ]

    tables = _shared_tables(columns, sample)

    def schema_of(columns: Sequence[SeenColumn]) -> DataSchema:
        def named(*roles: str) -> tuple[str, ...]:
            return tuple(seen.values.name for seen in columns if seen.role in roles)

        return DataSchema(
            name=_name_of(source),
            label_column=labels.name,
            label_positive=positive,
            label_negative=negative,
            time_column=time_column,
            numeric_columns=named(NUMERIC, COUNT),
            count_columns=named(COUNT),
            categorical_columns=tuple(
                seen.values.name for seen in columns if seen.has_table and seen.role != MULTI_HOT
            ),
            multi_hot_columns=tuple(
                MultiHotColumn(name=seen.values.name, max_length=seen.list_length)
                for seen in columns
                if seen.role == MULTI_HOT
            ),
            tables={
                name: table for name, table in tables.items() if {name, table} <= {*named(*_WITH_TABLES)}
            },
            missing_markers=sample.missing_texts,
            separator=sample.separator,
            list_separator=";" if sample.separator == "|" else "|",
            column_names=tuple(column_names),
        )

    readable = _readable(file, columns, schema_of)
    schema = schema_of(readable)
    return ProposedSchema(
        schema=schema,
        columns=[_with_table_named(seen, schema) for seen in readable],
        num_rows=sample.num_rows,
        click_share=float(is_click.mean()),
    )


def _name_of(source: str) -> str:
    """Return a schema's name: the file's without its endings, or that of a table without its namespace.

    Example:
        >>> _name_of("s3://bucket/Clicks-2026.tsv.gz"), _name_of("iceberg://here/shop.clicks")
        ('clicks_2026', 'clicks')
    """
    table = TablePath.parse(source)
    name = PurePath(source).name.split(".")[0] if table is None else table.name.rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_").lower() or "clicks"


def _shared_tables(columns: Sequence[SeenColumn], sample: TableSample) -> dict[str, str]:
    """Return by column the name of a table for columns that hold ids of one kind: a category, and lists of it.

    Of the different values of the lists, `_SHARED_VALUES` or more, half are values of the category, too. The table is
    called as the category.
    """
    sampled = {each.name: each for each in sample.columns}

    def values_of(role: str) -> dict[str, pa.StringArray]:
        texts = {seen.values.name: sampled[seen.values.name].texts for seen in columns if seen.role == role}
        return {
            name: canonical_texts(pc.unique(own.flatten() if is_list(own.type) else own).drop_null())
            for name, own in texts.items()
        }

    singles = values_of(CATEGORICAL)
    tables: dict[str, str] = {}
    for name, own in values_of(MULTI_HOT).items():
        shared = {single: pc.is_in(own, values).true_count for single, values in singles.items()}
        best = max(shared, key=shared.__getitem__, default="")
        if len(own) >= _SHARED_VALUES and 2 * shared.get(best, 0) >= len(own):
            tables |= {best: best, name: best}
    return tables


def _with_table_named(seen: SeenColumn, schema: DataSchema) -> SeenColumn:
    table = schema.tables.get(seen.values.name)
    if table in (None, seen.values.name):
        return seen
    remark = f"shares a table with {shown_name(str(table))}: are their values of one kind?"
    return replace(seen, remark="; ".join(filter(None, (seen.remark, remark))))


def _readable(
    file: SourcePath, columns: Sequence[SeenColumn], schema_of: Callable[[Sequence[SeenColumn]], DataSchema]
) -> Sequence[SeenColumn]:
    """Return the columns, those left out that the reader refuses in the first rows.

    Raises:
        DataError: No column of categories is left, or the reader refuses the rows for another reason.
    """
    slots = [seen for seen in columns if seen.has_table]
    if not slots:
        doubts = [f"{shown_name(seen.values.name)} {seen.remark}" for seen in columns if seen.is_leak]
        raise DataError(
            file,
            "; ".join(
                ["must have a column of categories for a click model, but none looks like one", *doubts]
            ),
        )
    refusal = _refusal(file, schema_of(columns))
    if refusal is None:
        return columns
    refusals = {seen.values.name: _refusal(file, schema_of([seen])) for seen in slots}
    good = next((seen for seen in slots if refusals[seen.values.name] is None), None)
    if good is None:
        raise refusal
    refusals |= {
        seen.values.name: _refusal(file, schema_of([good, seen]))
        for seen in columns
        if seen.role in (NUMERIC, COUNT)
    }
    kept = [
        seen
        if (found := refusals.get(seen.values.name)) is None
        else replace(seen, role=LEFT_OUT, remark=f"is refused: {found.problem}")
        for seen in columns
    ]
    refusal = _refusal(file, schema_of(kept))
    if refusal is not None:
        raise refusal
    return kept


def _refusal(file: SourcePath, schema: DataSchema) -> DataError | None:
    """Return why the reader refuses the first rows of a file; None where it reads them."""
    num_rows = 0
    try:
        check_columns(file, schema)
        for batch in read_rows([file], schema):
            num_rows += len(batch.labels)
            if num_rows >= SAMPLED_ROWS:
                break
    except DataError as error:
        return error
    return None


def _label_of(file: SourcePath, sample: TableSample, label: str | None) -> SampledColumn:
    """Return the label column of the name that is given, or of one that is called as labels are."""
    by_name = {column.name: column for column in sample.columns}
    if label is not None and label not in by_name:
        raise ConfigurationError(
            f"the label must be a column of {file}, which has {_listed(by_name)}; got {label}"
        )
    found = [name for name in by_name if name.lower() in LABEL_NAMES] if label is None else [label]
    if not found:
        raise DataError(
            file,
            f"has no column that is called as labels are ({', '.join(LABEL_NAMES)}); name it by --label, of "
            f"{_listed(by_name)}",
        )
    column = by_name[found[0]]
    if column.problem:
        raise DataError(file, f"the label column {column.name} cannot be used: it {column.problem}")
    try:
        is_label = not is_list(column.texts.type)
    except ARROW_ERRORS:
        is_label = False
    if not is_label:
        raise DataError(
            file,
            f"the label must hold texts or numbers, but column {column.name} holds {column.type}; name another "
            f"column by --label",
        )
    return column


def _label_texts(file: SourcePath, label: SampledColumn) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the texts of a click and of none: of two values the one that is called so, else the rarer one.

    A value may have several texts, such as 1 and 1.0, or yes and Yes.
    """
    counts = {each["values"]: each["counts"] for each in pc.value_counts(label.texts).to_pylist()}
    groups: dict[str, list[str]] = {}
    for text in counts:
        if text is not None:
            groups.setdefault(canonical_text(text).lower(), []).append(text)
    if None in counts or len(groups) != 2:
        raise DataError(
            file,
            f"the label must have a value in every row, of two, but column {label.name} has {len(counts)}: "
            f"{', '.join(map(repr, list(counts)[:5]))}; name another column by --label",
        )
    both = list(groups.values())
    called = [texts for texts in both if any(text.lower() in POSITIVE_TEXTS for text in texts)]
    rarer = min(both, key=lambda texts: sum(counts[text] for text in texts))
    positive = called[0] if len(called) == 1 else rarer
    negative = both[1] if positive is both[0] else both[0]
    return tuple(positive), tuple(negative)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(shown_name, names))
