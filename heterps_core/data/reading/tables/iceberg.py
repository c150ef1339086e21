"""Lists the files of an Iceberg table by pyiceberg (https://py.iceberg.apache.org)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyiceberg.catalog import load_catalog
from pyiceberg.conversions import from_bytes
from pyiceberg.manifest import DataFile, ManifestEntryStatus
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.snapshots import Operation, ancestors_of

from heterps_core.data.reading.tables.table_path import Commit, Snapshot, TableFile, TablePath
from heterps_core.errors import DataError


def list_table(table: TablePath) -> Snapshot:
    """Return the files of a snapshot; the catalog is one of ~/.pyiceberg.yaml or of PYICEBERG_CATALOG__NAME__URI.

    Raises:
        DataError: There is no such snapshot, it has delete files, or a name stands for several columns.
    """
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
    _check_names_stay(table, opened.schemas().values())
    scan = opened.scan(snapshot_id=snapshot.snapshot_id)
    schema, specs, files = scan.projection(), opened.specs(), []
    for task in scan.plan_files():
        if task.delete_files:
            raise DataError(
                table,
                f"must have no delete files, as rows of its files are deleted by them; compact it in Spark: "
                f"CALL {catalog}.system.rewrite_data_files(table => '{name}', options => "
                f"map('delete-file-threshold', '1'))",
            )
        file = task.file
        files.append(_table_file(file, schema, specs[file.spec_id]))
    columns = tuple((field.name, str(field.field_type)) for field in schema.fields)
    return Snapshot(id=str(snapshot.snapshot_id), files=tuple(files), columns=columns)


def commits_after(table: TablePath, snapshot_id: str) -> list[Commit]:
    """Return the commits between a snapshot and that of the table.

    Raises:
        DataError: The snapshot has expired, or the table does not descend from it.
    """
    catalog, _, name = table.place.partition("/")
    opened = load_catalog(catalog).load_table(name)
    newest = opened.snapshot_by_id(int(str(table.snapshot_id)))
    since = [] if newest is None else list(ancestors_of(newest, opened.metadata))
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


def _table_file(file: DataFile, schema: Schema, spec: PartitionSpec) -> TableFile:
    values: Any = file.partition
    partition = tuple(
        (field.name, field.transform.to_human_string(schema.find_type(field.source_id), value))
        for field, value in zip(spec.fields, values, strict=True)
    )
    # Its paths are not quoted, as those of a URI are.
    return TableFile(
        file.file_path.removeprefix("file://"), partition, _first_values(schema, file.lower_bounds)
    )


def _check_names_stay(table: TablePath, schemas: Iterable[Schema]) -> None:
    """Refuse a table whose older files may hold another column under a name."""
    names: dict[int, str] = {}
    ids: dict[str, int] = {}
    for schema in schemas:
        for field in schema.fields:
            before = names.setdefault(field.field_id, field.name)
            if before != field.name or ids.setdefault(field.name, field.field_id) != field.field_id:
                raise DataError(
                    table,
                    f"column {field.name} must have had one name and one field id since the table was made, but was "
                    f"renamed or dropped and added ({before}); write the rows to a new table",
                )


def _first_values(schema: Schema, bounds: dict[int, bytes] | None) -> dict[str, Any]:
    kinds = {field.field_id: field for field in schema.fields if field.field_type.is_primitive}
    return {
        kinds[number].name: from_bytes(kinds[number].field_type, value)  # type: ignore[arg-type]
        for number, value in (bounds or {}).items()
        if number in kinds
    }
