"""Rows that neither a champion nor a model of earlier days has seen: those of the day after the champion's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.reading.bucket_path import source_path
from heterps_core.data.reading.days import parse_day, partitions_of
from heterps_core.data.reading.source_files import files_of_day
from heterps_core.data.row_query import RowQuery
from heterps_core.data.schema import DataSchema


@contextmanager
def rows_after(
    day: str, *, data: str, schema: DataSchema, prepare_sql: str | None
) -> Iterator[PreparedDataset | None]:
    """Give all rows of the day after `day`, prepared for as long as the block runs; None where there is no such day.

    Raises:
        DataError: They cannot be read.
    """
    next_day = parse_day(day) + timedelta(days=1)
    source = source_path(data)
    source = source.expanduser() if isinstance(source, Path) else source
    files = files_of_day(partitions_of(source).get(next_day, ()))
    if not files:
        yield None
        return
    # Nothing is left out of rows to judge by.
    schema = replace(schema, negative_share=1.0)
    with TemporaryDirectory(prefix="heterps-rows-") as name:
        folder = Path(name)
        if prepare_sql is not None:
            query = RowQuery.load(Path(prepare_sql))
            files = (query.result(files, day=next_day, schema=schema, folder=folder / "queried"),)
        yield prepare_dataset(files, schema=schema, eval_fraction=0.0, out_dir=folder / "rows")
