"""Tables of Delta and Iceberg as their libraries write them, for tests."""

from dataclasses import replace
from datetime import date
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data.reading.parquet_reader import parquet_rows
from heterps_core.data.reading.tables.table_path import TablePath
from heterps_core.data.schema import DataSchema

deltalake = pytest.importorskip("deltalake")
catalogs = pytest.importorskip("pyiceberg.catalog")
_dataframe_to_data_files = pytest.importorskip("pyiceberg.io.pyarrow")._dataframe_to_data_files
_OverwriteFiles = pytest.importorskip("pyiceberg.table.update.snapshot")._OverwriteFiles
snapshots = pytest.importorskip("pyiceberg.table.snapshots")
manifests = pytest.importorskip("pyiceberg.manifest")
DataFile, DataFileContent, FileFormat = manifests.DataFile, manifests.DataFileContent, manifests.FileFormat
ManifestContent, ManifestWriterV2 = manifests.ManifestContent, manifests.ManifestWriterV2

SCHEMA = DataSchema(
    name="clicks",
    label_column="clicked",
    numeric_columns=("row",),
    categorical_columns=("town",),
    time_column="row",
)
DAYS = [date(2026, 11, day) for day in (1, 2)]


def clicks(first, stop):
    rows = range(first, stop)
    return pa.table(
        {
            "row": pa.array(rows, pa.int64()),
            "clicked": pa.array([row % 2 for row in rows], pa.int64()),
            "town": [f"town {row % 3}" for row in rows],
            "day": [str(DAYS[row % 2]) for row in rows],
        }
    )


class Delta:
    def __init__(self, folder):
        self.folder, self.data = folder, f"delta://{folder}/clicks"

    def append(self, rows, by=()):
        deltalake.write_deltalake(f"{self.folder}/clicks", rows, mode="append", partition_by=list(by) or None)

    def widen(self, rows):
        deltalake.write_deltalake(f"{self.folder}/clicks", rows, mode="append", schema_mode="merge")

    def delete(self, condition):
        deltalake.DeltaTable(f"{self.folder}/clicks").delete(condition)

    def compact(self):
        deltalake.DeltaTable(f"{self.folder}/clicks").optimize.compact()


class _Rewrite(_OverwriteFiles):
    """A snapshot of the operation `replace`, as Spark writes it."""

    def _summary(self, *arguments):
        found = super()._summary(*arguments)
        return snapshots.Summary(snapshots.Operation.REPLACE, **found.additional_properties)


class Iceberg:
    def __init__(self, folder):
        self.data = "iceberg://here/shop.clicks"
        self.catalog = catalogs.load_catalog("here")
        self.catalog.create_namespace("shop")
        self.folder = folder

    def append(self, rows, by=()):
        table = self.catalog.create_table_if_not_exists("shop.clicks", rows.schema)
        if by and not table.spec().fields:
            with table.update_spec() as spec:
                for name in by:
                    spec.add_identity(name)
        table.append(rows)

    def widen(self, rows):
        table = self.catalog.load_table("shop.clicks")
        with table.update_schema() as change:
            change.union_by_name(rows.schema)
        table.append(rows)

    def delete(self, condition):
        self.catalog.load_table("shop.clicks").delete(condition)

    def compact(self):
        """Write all rows to new files, as rewrite_data_files of Spark does; pyiceberg has no call for it."""
        table = self.catalog.load_table("shop.clicks")
        old = [task.file for task in table.scan().plan_files()]
        with table.transaction() as change:
            new = _dataframe_to_data_files(
                table_metadata=change.table_metadata, df=table.scan().to_arrow(), io=table.io
            )
            with _Rewrite(snapshots.Operation.OVERWRITE, change, table.io) as replacing:
                for file in new:
                    replacing.append_data_file(file)
                for file in old:
                    replacing.delete_data_file(file)


def row_ids(files):
    """Return the values of `row` that files hold, as their table shows them."""
    found = []
    for file in files:
        with parquet_rows(file) as rows:
            found += [row for batch in rows.batches(1_000, ["row"]) for row in batch["row"].to_pylist()]
    return found


def in_time(data, snapshot=None):
    return replace(TablePath.parse(data), snapshot_id=snapshot, time_column="row")


class _DeleteManifest(ManifestWriterV2):
    def content(self):
        return ManifestContent.DELETES

    @property
    def _meta(self):
        return super()._meta | {"content": "deletes"}


class _AddDeletes(_OverwriteFiles):
    """A snapshot that adds delete files, as Flink and Trino write them; pyiceberg rewrites data files instead."""

    def new_manifest_writer(self, spec):
        metadata = self._transaction.table_metadata
        return _DeleteManifest(
            spec, metadata.schema(), self.new_manifest_output(), self._snapshot_id, self._compression
        )


def delete_by_position(iceberg, rows):
    """Delete rows of `row` by a file of positions."""
    table = iceberg.catalog.load_table("shop.clicks")
    for task in table.scan().plan_files():
        path = task.file.file_path
        held = pq.read_table(path.removeprefix("file://"), columns=["row"])["row"].to_pylist()
        places = [place for place, row in enumerate(held) if row in rows]
        if places:
            positions = pa.table({"file_path": [path] * len(places), "pos": pa.array(places, pa.int64())})
            _add_deletes(table, positions, DataFileContent.POSITION_DELETES, task.file.partition)


def delete_by_value(iceberg, rows):
    """Delete rows of `row` by a file of values that deleted rows are equal to."""
    table = iceberg.catalog.load_table("shop.clicks")
    values = pa.table({"row": pa.array(rows, pa.int64())})
    _add_deletes(table, values, DataFileContent.EQUALITY_DELETES, table.scan().plan_files()[0].file.partition)


def _add_deletes(table, rows, content, partition):
    path = f"{table.location()}/data/{uuid4()}.parquet"
    pq.write_table(rows, path.removeprefix("file://"))
    file = DataFile.from_args(
        content=content,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=partition,
        record_count=len(rows),
        file_size_in_bytes=Path(path.removeprefix("file://")).stat().st_size,
        equality_ids=[1] if content == DataFileContent.EQUALITY_DELETES else None,
    )
    file.spec_id = table.spec().spec_id
    with (
        table.transaction() as change,
        _AddDeletes(snapshots.Operation.DELETE, change, table.io) as deleting,
    ):
        deleting.append_data_file(file)
