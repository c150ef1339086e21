"""Lists the files of an Iceberg table by pyiceberg (https://py.iceberg.apache.org)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyiceberg.conversions import from_bytes
from pyiceberg.io.pyarrow import _read_deletes
from pyiceberg.manifest import DataFile, ManifestEntryStatus
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.snapshots import Operation, ancestors_of
from pyiceberg.table.snapshots import Snapshot as TableSnapshot
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import PrimitiveType

from heterps_core.data.reading.arrow_errors import named_reading
from heterps_core.data.reading.parquet_rows import NO_POSITIONS, Positions
from heterps_core.data.reading.tables.table_path import Commit, Snapshot, TableFile, TablePath
from heterps_core.errors import DataError


def newest_id(table: TablePath) -> str:
    """Return the id of the newest snapshot; raises DataError where there is none."""
    return str(_opened(table)[1].snapshot_id)


def list_table(table: TablePath) -> Snapshot:
    """Return the files of a snapshot; the catalog is one of ~/.pyiceberg.yaml or of PYICEBERG_CATALOG__NAME__URI.

    Raises:
        DataError: There is no such snapshot, or it has equality deletes.
    """
    catalog, _, name = table.place.partition("/")
    opened, snapshot = _opened(table)
    scan = opened.scan(snapshot_id=snapshot.snapshot_id)
    try:
        tasks = list(scan.plan_files())
    except (ValueError, NotImplementedError) as error:
        if "equality delete" not in str(error):
            raise
        raise DataError(
            table,
            f"must have no equality deletes, as which rows they delete is known only once all are read; compact it "
            f"in Spark: CALL {catalog}.system.rewrite_data_files(table => '{name}', options => "
            f"map('delete-file-threshold', '1'))",
        ) from error
    newest, current = opened.schema(), opened.current_snapshot()
    schema = newest if current and current.snapshot_id == snapshot.snapshot_id else scan.projection()
    specs = opened.specs()
    read = lru_cache(64)(partial(_read_deletes, opened.io))
    files = [
        _table_file(task.file, schema, specs[task.file.spec_id], table.time_column)._replace(
            find_deleted=partial(_deleted_rows, read, task) if task.delete_files else None
        )
        for task in tasks
    ]
    mapping = opened.name_mapping()
    names = {each.field_id: each.names for each in (mapping.root if mapping else ())}
    return Snapshot(
        id=str(snapshot.snapshot_id),
        files=tuple(files),
        columns=tuple((field.name, str(field.field_type)) for field in schema.fields),
        # An older snapshot has its own columns, then those that the table has now.
        keys={
            field.name: (field.field_id, *names.get(field.field_id, [field.name]))
            for field in (*newest.fields, *schema.fields)
        },
    )


def _opened(table: TablePath) -> tuple[Table, TableSnapshot]:
    catalog, _, name = table.place.partition("/")
    opened = load_catalog(catalog).load_table(name)
    snapshot = (
        opened.snapshot_by_id(int(table.snapshot_id)) if table.snapshot_id else opened.current_snapshot()
    )
    if snapshot is None:
        raise DataError(
            table,
            f"has no snapshot {table.snapshot_id or 'yet'}; write rows, or name one that has not expired "
            f"({', '.join(str(each.snapshot_id) for each in opened.snapshots()[-3:]) or 'none is there'})",
        )
    return opened, snapshot


def _deleted_rows(read: Callable[[DataFile], dict[str, pa.ChunkedArray]], task: FileScanTask) -> Positions:
    """Return the rows of a file that its delete files name."""
    found = []
    for file in task.delete_files:
        with named_reading(file.file_path, problem="cannot be read as deleted rows"):
            positions = read(file).get(task.file.file_path)
        found += [] if positions is None else [positions.to_numpy()]
    return np.concatenate([NO_POSITIONS, *found])


def commits_after(table: TablePath, snapshot_id: str) -> list[Commit]:
    """Return the commits between a snapshot and that of the table.

    Raises:
        DataError: The snapshot has expired, or the table does not descend from it.
    """
    opened, newest = _opened(table)
    since = list(ancestors_of(newest, opened.metadata))
    ids = [str(snapshot.snapshot_id) for snapshot in since]
    if snapshot_id not in ids:
        raise DataError(table, f"does not descend from snapshot {snapshot_id}, or this has expired")
    commits = []
    for snapshot in reversed(since[: ids.index(snapshot_id)]):
        files = tuple(
            _table_file(entry.data_file, opened.schema(), opened.specs()[manifest.partition_spec_id])
            for manifest in snapshot.manifests(opened.io)
            if manifest.added_snapshot_id == snapshot.snapshot_id
            for entry in manifest.fetch_manifest_entry(opened.io, discard_deleted=False)
            if entry.status != ManifestEntryStatus.EXISTING
        )
        operation = None if snapshot.summary is None else snapshot.summary.operation
        if operation == Operation.APPEND:
            commits.append(Commit(files, ()))
        elif operation != Operation.REPLACE:
            commits.append(Commit((), files))
    return commits


def _table_file(
    file: DataFile, schema: Schema, spec: PartitionSpec, time_column: str | None = None
) -> TableFile:
    partition, values = [], {}
    record: Any = file.partition
    for field, value in zip(spec.fields, record, strict=True):
        text = field.transform.to_human_string(schema.find_type(field.source_id), value)
        partition.append((field.name, text))
        if isinstance(field.transform, IdentityTransform):
            values[str(schema.find_column_name(field.source_id))] = None if value is None else text
    # Its paths are not quoted, as those of a URI are.
    uri = file.file_path.removeprefix("file://")
    return TableFile(uri, tuple(partition), _first_time(schema, file.lower_bounds or {}, time_column), values)


def _first_time(schema: Schema, bounds: dict[int, bytes], column: str | None) -> Any:
    for field in schema.fields:
        if field.name == column and field.field_id in bounds and isinstance(field.field_type, PrimitiveType):
            return from_bytes(field.field_type, bounds[field.field_id])
    return None
