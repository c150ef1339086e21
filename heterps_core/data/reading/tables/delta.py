"""Lists the files of a Delta table by deltalake (https://delta-io.github.io/delta-rs)."""

from __future__ import annotations

import json
from functools import partial
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

from heterps_core.data.reading.bucket_path import source_path
from heterps_core.data.reading.parquet_reader import open_parquet
from heterps_core.data.reading.parquet_rows import Positions
from heterps_core.data.reading.tables.table_path import Commit, Snapshot, TableFile, TablePath
from heterps_core.errors import DataError


def newest_id(table: TablePath) -> str:
    """Return the newest version."""
    return str(DeltaTable(table.place).version())


def list_table(table: TablePath) -> Snapshot:
    """Return the files of a version.

    Raises:
        DataError: Rows of a file that it does not list are deleted.
    """
    opened = DeltaTable(table.place, version=int(table.snapshot_id) if table.snapshot_id else None)
    keys = _keys_of_columns(opened)
    masks = _kept_rows(opened)
    added = pa.table(opened.get_add_actions(flatten=True))
    names = [name for name in added.column_names if name.startswith("partition.")]
    # Statistics are by the name in files, partitions by that of the table.
    first = f"min.{keys.get(str(table.time_column), ('',))[-1]}"
    firsts = [first] if first in added.column_names else []
    files = []
    for row in added.select([*names, *firsts, "path"]).to_pylist():
        uri = _uri(table.place, unquote(row["path"]))
        values = {name.partition(".")[2]: None if row[name] is None else str(row[name]) for name in names}
        files.append(
            TableFile(
                uri=uri,
                partition=tuple((name, str(value)) for name, value in values.items()),
                first_time=row.get(first),
                values=values,
                find_deleted=partial(_deleted_rows, masks[uri]) if uri in masks else None,
            )
        )
    if lost := masks.keys() - {file.uri for file in files}:
        raise DataError(
            table, f"has a deletion vector of {min(lost)}, which is none of its files; check the table"
        )
    columns = tuple((field.name, str(field.type.type)) for field in opened.schema().fields)
    return Snapshot(id=str(opened.version()), files=tuple(files), columns=columns, keys=keys)


def _keys_of_columns(opened: DeltaTable) -> dict[str, tuple[int | str, ...]]:
    """Return by the name of each column the keys by which files have it: its id where it is mapped by ids, a name."""
    fields = opened.schema().fields
    mode = opened.metadata().configuration.get("delta.columnMapping.mode")
    if mode not in ("name", "id"):
        return {field.name: (field.name,) for field in fields}
    found = [
        [field.metadata[f"delta.columnMapping.{key}"] for key in ("id", "physicalName")] for field in fields
    ]
    return {field.name: tuple(ids[mode == "name" :]) for field, ids in zip(fields, found, strict=True)}


def _kept_rows(opened: DeltaTable) -> dict[str, pa.BooleanArray]:
    """Return whether rows count, of each file that has a deletion vector; rows after its end do."""
    if "deletionVectors" not in (opened.protocol().reader_features or ()):
        return {}
    vectors = pa.RecordBatchReader.from_stream(opened.deletion_vectors()).read_all()
    masks = zip(vectors["filepath"].to_pylist(), vectors["selection_vector"], strict=True)
    return {str(source_path(path)): kept.values for path, kept in masks}


def _deleted_rows(kept: pa.BooleanArray) -> Positions:
    return np.flatnonzero(~kept.to_numpy(zero_copy_only=False))


def commits_after(table: TablePath, snapshot_id: str) -> list[Commit]:
    """Return the commits between a version and that of the table, by its log.

    Raises:
        OSError: The log does not reach back so far.
    """
    keys = _keys_of_columns(DeltaTable(table.place, version=int(str(table.snapshot_id))))
    names = {str(ids[-1]): name for name, ids in keys.items()}
    commits = []
    for version in range(int(snapshot_id) + 1, int(str(table.snapshot_id)) + 1):
        with open_parquet(source_path(f"{table.place}/_delta_log/{version:020d}.json")) as log:
            actions = [json.loads(line) for line in log.read().splitlines()]
        added, removed = (
            tuple(
                TableFile(
                    uri=_uri(table.place, unquote(action[kind]["path"])),
                    partition=tuple(
                        (names.get(key, key), value)
                        for key, value in (action[kind].get("partitionValues") or {}).items()
                    ),
                )
                for action in actions
                if kind in action and action[kind]["dataChange"]
            )
            for kind in ("add", "remove")
        )
        commits.append(Commit((), added + removed) if removed else Commit(added, ()))
    return commits


def _uri(root: str, path: str) -> str:
    return path if path.startswith("/") or "://" in path else f"{root}/{path}"
