"""A source of rows as a flow is asked for it: data, its schema, and the query that makes the rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from heterps_core.data.history.event_join import check_history
from heterps_core.data.reading.bucket_path import SourcePath, source_path
from heterps_core.data.reading.days import Night, find_night, parse_day
from heterps_core.data.reading.readers import check_columns, list_source_files
from heterps_core.data.reading.tables.listing import pinned
from heterps_core.data.reading.tables.table_path import TablePath
from heterps_core.data.reading.time_order import times_of
from heterps_core.data.row_query import RowQuery
from heterps_core.data.schema import CRITEO_SCHEMA, DataSchema
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.training.storage.store import check_store_location
from tasks.records.mlflow_names import MADE_UP_DATA


@dataclass(frozen=True, kw_only=True, slots=True)
class ClickSource:
    """Where the rows are, and what they mean; without data the synthetic click stream."""

    data: str | None = None
    """File, folder or pattern, here or in a bucket (s3://bucket/prefix), or a table (docs/DATA.md)."""

    schema_file: str | None = None
    """None for the Criteo format."""

    prepare_sql: str | None = None
    """File of a query that makes the rows, see `row_query.py`; None takes the data as it is."""

    snapshot: str | None = None
    """Version or snapshot id of a table; None for the newest."""

    @property
    def path(self) -> SourcePath | TablePath:
        """Absolute path of the data, which is given."""
        assert self.data is not None
        table = TablePath.parse(self.data)
        if table is not None:
            return replace(table, snapshot_id=self.snapshot, time_column=self.schema.time_column)
        return _absolute(self.data)

    @property
    def table(self) -> TablePath | None:
        """The table that the rows are in, at the newest snapshot unless one is named; None where they are in none."""
        path = None if self.data is None else self.path
        return pinned(path) if isinstance(path, TablePath) else None

    @property
    def schema(self) -> DataSchema:
        """Columns and their meaning; raises ConfigurationError where the file cannot be used."""
        schema = CRITEO_SCHEMA if self.schema_file is None else DataSchema.load(Path(self.schema_file))
        if schema.history is None:
            return schema
        table = str(TablePath.parse(schema.history.table) or _absolute(schema.history.table))
        return replace(schema, history=replace(schema.history, table=table))

    @property
    def name(self) -> str:
        """One name, the same from whatever folder a run is started."""
        if self.data is None:
            return MADE_UP_DATA
        source = str(TablePath.parse(self.data) or self.path)
        for word, file in (("through", self.prepare_sql), ("by", self.schema_file)):
            source += "" if file is None else f" {word} {_absolute(file)}"
        return source

    def night(self, day: str | None) -> Night | None:
        """Return the days that a night trains on and is judged on; None where the data is not cut into days.

        Args:
            day: To train on; None for the latest whose next day is there too.

        Raises:
            DataError: The day or the one after it is missing or has no file.
            ConfigurationError: It is no date, or the data has no days.
        """
        wanted = None if day is None else parse_day(day)
        if self.data is not None:
            return find_night(self.path, wanted)
        if wanted is not None:
            raise ConfigurationError(
                f"day {wanted} can be chosen only of data that is cut into days, but no data is given; name the "
                f"folder that holds day={wanted}, or make one with heterps make-days"
            )
        return None

    def rows_of(
        self, files: tuple[SourcePath, ...], *, day: date | None, folder: Path
    ) -> tuple[SourcePath, ...]:
        """Return files as the query makes them, with its results in a folder; or as they are."""
        if self.prepare_sql is None:
            return files
        query = RowQuery.load(Path(self.prepare_sql))
        return (query.result(files, day=day, schema=self.schema, folder=folder),)

    def check(self, day: str | None = None) -> None:
        """Check that data, a day of it, schema and query can be found, without reading the rows.

        Raises:
            DataError: There is no such source, or the day or the one after it is missing.
            ConfigurationError: A file is missing, or no schema; or a day is asked for where there are none.
        """
        for file, use in (
            (self.schema_file, "a schema file describes"),
            (self.prepare_sql, "a query of prepare_sql makes"),
        ):
            if file is not None and self.data is None:
                raise ConfigurationError(
                    f"{use} the columns of data, but there is no data beside {file}; give both"
                )
        if self.prepare_sql is not None:
            RowQuery.load(Path(self.prepare_sql))
        if self.snapshot is not None and TablePath.parse(self.data) is None:
            raise ConfigurationError(
                f"snapshot {self.snapshot} can be chosen only of a table (delta://PATH, iceberg://CATALOG/TABLE), "
                f"but the data is {self.data or 'the synthetic stream'}; leave the snapshot out"
            )
        _ = self.schema
        if self.night(day) is None and self.data is not None:
            if isinstance(self.path, TablePath) and self.path.time_column is None:
                raise ConfigurationError(
                    f"{self.path} has no partition of days, and its files are in no order; name a time_column in the "
                    f"schema, by which files are ordered, or partition the table by day"
                )
            list_source_files(self.path)

    def check_columns(self, day: str | None = None) -> None:
        """Check the schema's columns by the first file of the data, or of both days, or by the query.

        Raises:
            DataError: One is missing; names day, file and line.
            ConfigurationError: The schema or the query cannot be used.
        """
        if self.data is None:
            return
        schema, night = self.schema, self.night(day)
        files = list_source_files(self.path) if night is None else night.train_files
        if self.prepare_sql is not None:
            query = RowQuery.load(Path(self.prepare_sql))
            query.check(files, day=None if night is None else night.day, schema=schema)
            return
        try:
            with naming_day(night):
                sources = [files] if night is None else [files, night.eval_files]
                check_history([each[0] for each in sources], schema)
                for of_source in sources:
                    check_columns(of_source[0], schema)
                    if schema.time_column is not None:
                        next(times_of(of_source[0], schema), None)
        except DataError as error:
            if self.schema_file is not None:
                raise
            raise DataError(
                error.path,
                f"{error.problem}; rows of another format than Criteo's need a schema file: heterps init proposes "
                f"one",
                line=error.line,
            ) from error


@contextmanager
def naming_day(night: Night | None) -> Iterator[None]:
    """Name the day where a file of a night cannot be read."""
    try:
        yield
    except DataError as error:
        day = None if night is None else night.day_of(error.path)
        if day is None:
            raise
        raise DataError(
            f"day {day}, {error.path}",
            f"{error.problem}; nothing was launched, and the champion stays: fix that day, or choose another",
            line=error.line,
        ) from error


def _absolute(name: str) -> SourcePath:
    path = source_path(name)
    if isinstance(path, Path):
        return path.expanduser().absolute()
    check_store_location(name)
    return path
