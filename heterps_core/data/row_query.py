"""Rows that a SQL query makes of the files of a source before they are prepared: joins, labels, filters.

DuckDB runs the query over Arrow's data sets, which read files of this machine and of buckets alike. Its tables are
`rows`, the files of the source or of one day of it, and every file, folder or pattern that it names in quotes. It can
open no other, so it is known what a result was made from: it is kept by the query and what these files hold.

Joins and groups lose the order of rows. So a result without an ORDER BY of its own is sorted by the schema's
`time_column`; where there is neither, a query that may lose the order is refused, as the latest rows are held out.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from pyarrow import fs

from heterps_core.data.manifest import SourceFile, describe_sources
from heterps_core.data.reading.bucket_path import BucketPath, SourcePath
from heterps_core.data.reading.file_kinds import is_parquet, open_text
from heterps_core.data.reading.parquet_reader import columns_in_common
from heterps_core.data.reading.quote_escapes import WAY_OUT, QuoteEscapes
from heterps_core.data.reading.readers import holds_rows, list_source_files
from heterps_core.data.reading.text_conversion import ROWS_PER_GROUP
from heterps_core.data.schema import DataSchema
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.json_codec import JsonDocument
from heterps_core.json_file import read_json, replace_json

if TYPE_CHECKING:
    import duckdb
    import pyarrow.dataset as pa_dataset

ROWS_TABLE = "rows"
DAY = "$day"

_RESULT, _MADE_FROM = "rows.parquet", "made_from.json"
_LINE_BYTES = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryInputs(JsonDocument):
    """The files that a result was made from."""

    files: tuple[SourceFile, ...]


@dataclass(frozen=True, slots=True)
class RowQuery:
    """One SELECT in a file of its own."""

    path: Path
    text: str

    @classmethod
    def load(cls, path: Path) -> RowQuery:
        """Read a query.

        Raises:
            ConfigurationError: The file cannot be read.
        """
        try:
            return cls(path, path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"the query of prepare_sql cannot be read: {error}") from error

    def check(self, files: Sequence[SourcePath], *, day: date | None, schema: DataSchema) -> None:
        """Check, without running it, that a query can be run and returns the columns of a schema.

        Raises:
            DataError, ConfigurationError: As `result`, or a column is missing.
        """
        with (
            tempfile.TemporaryDirectory() as scratch,
            self._connected(files, day=day, schema=schema, scratch=scratch) as (connection, text, _),
        ):
            found = self._relation(connection, text, day=day, schema=schema).columns
        needed = (*schema.used_columns, *schema.order_columns)
        missing = [column for column in needed if column not in found]
        if missing:
            raise DataError(
                self.path,
                f"must return the columns {', '.join(missing)} of the schema; returns {', '.join(found)}",
            )

    def result(
        self, files: Sequence[SourcePath], *, day: date | None, schema: DataSchema, folder: Path
    ) -> Path:
        """Run the query, or find what it gave before; returns a Parquet file in a folder below `folder`.

        Args:
            files: What `rows` are; text comes with a header or as the schema's `column_names`, each column as text,
                NULL where it is empty.
            day: In the place of $day in the query, as a text; None where the source has no days.

        Raises:
            DataError: A file cannot be read, or the result has no row.
            ConfigurationError: The query is no SELECT or cannot be run, or duckdb is not installed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch,
            self._connected(files, day=day, schema=schema, scratch=scratch) as (connection, text, tables),
        ):
            names = [(table, file) for table, of_table in tables.items() for file in of_table]
            inputs = describe_sources(file for _, file in names)
            contents = [
                (table, each.size_bytes, each.tag) for (table, _), each in zip(names, inputs, strict=True)
            ]
            document = json.dumps([text, schema.column_names, schema.time_column, contents])
            place = folder / hashlib.sha256(document.encode()).hexdigest()[:16]
            if not (place / _MADE_FROM).exists():
                # What a run that was killed left there goes.
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir(parents=True)
                try:
                    rows = self._relation(connection, text, day=day, schema=schema)
                    if not _write(rows, place / _RESULT):
                        of_day = "" if day is None else f" for day {day}"
                        raise DataError(
                            self.path, f"must return at least one row{of_day}, got none of {files[0]}"
                        )
                    if describe_sources(file for _, file in names) != inputs:
                        raise DataError(
                            self.path,
                            "the files of its tables must not change while it runs, but did; run it once more",
                        )
                    replace_json(place / _MADE_FROM, QueryInputs(files=inputs).to_json())
                except OSError as error:
                    free_bytes = shutil.disk_usage(folder).free
                    raise DataError(
                        place, f"cannot be written, with {free_bytes:,} bytes free: {error}; free space"
                    ) from error
                finally:
                    if not (place / _MADE_FROM).exists():
                        shutil.rmtree(place, ignore_errors=True)
        return place / _RESULT

    @contextmanager
    def _connected(
        self, files: Sequence[SourcePath], *, day: date | None, schema: DataSchema, scratch: str
    ) -> Iterator[tuple[duckdb.DuckDBPyConnection, str, dict[str, tuple[SourcePath, ...]]]]:
        """Yield a database that has the tables of the query, its text for a day, and the files of the tables.

        What does not fit into memory goes to a folder, `scratch`.
        """
        try:
            import duckdb
        except ImportError as error:
            raise ConfigurationError(
                "prepare_sql needs the package duckdb, which is not installed: pip install 'heterps[sql]'"
            ) from error
        text = self.text if day is None else self.text.replace(DAY, f"'{day}'")
        limits: dict[str, str | bool | int | float | list[str]] = {
            "enable_external_access": False,
            "python_enable_replacements": False,
            "temp_directory": scratch,
        }
        try:
            with duckdb.connect(config=limits) as connection:
                tables = {
                    name: tuple(files) if name == ROWS_TABLE else self._files_of(name)
                    for name in self._table_names(connection, text)
                }
                for name, of_table in tables.items():
                    connection.register(name, _arrow_dataset(of_table, schema))
                yield connection, text, tables
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            message = " ".join(str(error).partition("\nLINE ")[0].split())
            raise ConfigurationError(
                f"the query of {self.path} cannot be run: {message}; correct it"
            ) from error

    def _relation(
        self, connection: duckdb.DuckDBPyConnection, text: str, *, day: date | None, schema: DataSchema
    ) -> duckdb.DuckDBPyRelation:
        """Return what a query gives, in the order of time.

        Raises:
            ConfigurationError: The order is not known, and the source has no days.
        """
        rows, (tree,) = connection.sql(text), self._tree(connection, text)["statements"]
        if _is_sorted(tree["node"]):
            return rows
        if schema.time_column in rows.columns:
            quoted = '"{}"'.format(str(schema.time_column).replace('"', '""'))
            is_text = rows.types[rows.columns.index(str(schema.time_column))] == "VARCHAR"
            kinds = ("DOUBLE", "TIMESTAMP") if is_text else ()
            return rows.order(", ".join([*(f"TRY_CAST({quoted} AS {kind})" for kind in kinds), quoted]))
        if day is None and any(map(_loses_order, _nodes(tree))):
            raise ConfigurationError(
                f"{self.path} must end with an ORDER BY of the time, or the schema name a time_column that it "
                f"returns: the latest rows are held out, and joins, groups, DISTINCT, windows and subqueries lose "
                f"the order"
            )
        return rows

    def _tree(self, connection: duckdb.DuckDBPyConnection, text: str) -> Any:
        (found,) = connection.execute("SELECT json_serialize_sql(?)", [text]).fetchall()
        return json.loads(found[0])

    def _table_names(self, connection: duckdb.DuckDBPyConnection, text: str) -> list[str]:
        """Return the tables that a query reads, those that it names itself (WITH) not among them."""
        tree = self._tree(connection, text)
        if tree["error"] or len(tree["statements"]) != 1:
            problem = tree.get("error_message", f"got {len(tree.get('statements', ()))} of them")
            raise ConfigurationError(f"{self.path} must hold one SELECT: {problem}")
        nodes = list(_nodes(tree))
        own = {entry["key"] for node in nodes for entry in node.get("cte_map", {}).get("map", ())}
        return sorted({node["table_name"] for node in nodes if node.get("type") == "BASE_TABLE"} - own)

    def _files_of(self, name: str) -> tuple[SourcePath, ...]:
        try:
            return list_source_files(name)
        except DataError as error:
            raise DataError(
                self.path,
                f"its tables must be {ROWS_TABLE}, or files, folders or patterns in quotes, got {name!r}: "
                f"{error.problem}",
            ) from error


def inputs_of(source: SourceFile) -> tuple[SourceFile, ...]:
    """Return what a source file of a prepared data set was made from by a query; itself where by none."""
    made_from = Path(source.path).with_name(_MADE_FROM)
    if not made_from.exists():
        return (source,)
    return QueryInputs.from_json(read_json(made_from, what="inputs of a query")).files


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects of a JSON document."""
    if isinstance(tree, dict):
        yield tree
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _nodes(child)


def _is_sorted(select: dict[str, Any]) -> bool:
    return any(modifier["type"] == "ORDER_MODIFIER" for modifier in select["modifiers"])


def _loses_order(node: dict[str, Any]) -> bool:
    """Tell whether DuckDB may return rows in another order than that of the table below a node."""
    return bool(
        node.get("type") in ("JOIN", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "DISTINCT_MODIFIER")
        or node.get("class") in ("WINDOW", "SUBQUERY")
        or node.get("group_expressions")
        or node.get("sample")
    )


def _write(rows: duckdb.DuckDBPyRelation, path: Path) -> int:
    """Write what a query returns as Parquet; returns its number of rows."""
    num_rows = 0
    with (
        rows.to_arrow_reader(ROWS_PER_GROUP) as reader,
        pq.ParquetWriter(path, reader.schema, compression="zstd") as writer,
    ):
        for batch in reader:
            writer.write_batch(batch)
            num_rows += batch.num_rows
    return num_rows


def _arrow_dataset(files: Sequence[SourcePath], schema: DataSchema) -> pa_dataset.Dataset:
    """Return files as one table, with a column for each folder named key=value that they lie in and do not name."""
    # It loads pandas where that is installed, for half a second, which only queries need.
    import pyarrow.dataset as pa_dataset

    first = next(filter(holds_rows, files), files[0])
    other = next((file for file in files if is_parquet(file) != is_parquet(first)), None)
    if other is not None:
        raise DataError(
            other,
            f"the files of a table must be all Parquet or all text, but {first} is of the other kind; name one by a "
            f"pattern, or each as a table of its own in the query",
        )
    if not is_parquet(first):
        with ThreadPoolExecutor() as pool:
            files = [file for file, holds in zip(files, pool.map(holds_rows, files), strict=True) if holds]
    make = partial(
        pa_dataset.FileSystemDatasetFactory,
        first.file_system if isinstance(first, BucketPath) else fs.LocalFileSystem(),
        [file.key if isinstance(file, BucketPath) else str(file.absolute()) for file in files],
        pa_dataset.ParquetFileFormat() if is_parquet(first) else _text_format(first, schema),
    )

    def factory(folders: Any) -> pa_dataset.DatasetFactory:
        return make(pa_dataset.FileSystemFactoryOptions(partitioning=folders))

    of_files = (
        columns_in_common(files, are_stored=True)
        if is_parquet(first)
        else factory(pa_dataset.HivePartitioning(pa.schema([]))).inspect(fragments=1)
    )
    of_folders = pa.schema(
        field
        for field in factory(pa_dataset.HivePartitioning.discover()).inspect(fragments=0)
        if field.name not in of_files.names
    )
    columns = pa.schema([*of_files, *of_folders])
    return factory(pa_dataset.HivePartitioning(of_folders)).finish(columns)


def _text_format(file: SourcePath, schema: DataSchema) -> pa_dataset.CsvFileFormat:
    import pyarrow.dataset as pa_dataset

    with open_text(file) as stream:
        head = stream.read(_LINE_BYTES)
    line = head.partition(b"\n")[0].decode("utf-8-sig", errors="replace").rstrip("\r")
    delimiter = (schema.separator or "")[:1]
    if not delimiter or delimiter not in line:
        delimiter = "\t" if line.count("\t") > line.count(",") else ","
    names = [name.strip('"') for name in line.split(delimiter)]
    is_quoted = delimiter != "\t" or line.startswith('"')
    if is_quoted and QuoteEscapes(file, delimiter).rewritten(head) != head:
        raise DataError(file, f"escapes quotes by a backslash, which a query does not read; {WAY_OUT}")
    has_header = not schema.column_names or not {*names}.isdisjoint(schema.column_names)
    return pa_dataset.CsvFileFormat(
        parse_options=pa_csv.ParseOptions(
            delimiter=delimiter, quote_char=is_quoted and '"', newlines_in_values=is_quoted
        ),
        read_options=pa_csv.ReadOptions(column_names=None if has_header else schema.column_names),
        convert_options=pa_csv.ConvertOptions(
            column_types=dict.fromkeys(names if has_header else schema.column_names, "string"),
            null_values=[""],
            strings_can_be_null=True,
        ),
    )
