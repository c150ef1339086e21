"""Lists the files of a Delta table by deltalake (https://delta-io.github.io/delta-rs)."""

from __future__ import annotations

import json
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable

from heterps_core.data.reading.bucket_path import source_path
from heterps_core.data.reading.parquet_reader import open_parquet
from heterps_core.data.reading.tables.table_path import Commit, Snapshot, TableFile, TablePath
from heterps_core.errors import DataError


def list_table(table: TablePath) -> Snapshot:
    """Return the files of a version.

    Raises:
        DataError: Files have deletion vectors, or columns are mapped.
    """
    opened = DeltaTable(table.place, version=int(table.snapshot_id) if table.snapshot_id else None)
    if opened.metadata().configuration.get("delta.columnMapping.mode", "none") != "none":
        raise DataError(
            table,
            "must store columns by their names, but maps them (delta.columnMapping.mode); write it once more without "
            "the mapping: spark.read.format('delta').load(...).write.format('delta').save('OTHER FOLDER')",
        )
    if "deletionVectors" in (opened.protocol().reader_features or ()) and any(
        batch.num_rows for batch in pa.RecordBatchReader.from_stream(opened.deletion_vectors())
    ):
        raise DataError(
            table,
            f"must have no deletion vectors, as rows of its files are deleted by them; purge them in Spark: REORG "
            f"TABLE delta.`{table.place}` APPLY (PURGE)",
        )
    added = pa.table(opened.get_add_actions(flatten=True))
    names = [name for name in added.column_names if name.startswith("partition.")]
    firsts = [name for name in added.column_names if name.startswith("min.")]
    rows = added.select([*names, *firsts, "path"]).to_pylist()
    root = table.place
    return Snapshot(
        id=str(opened.version()),
        files=tuple(
            TableFile(
                uri=_uri(root, unquote(row["path"])),
                partition=tuple((name.removeprefix("partition."), str(row[name])) for name in names),
                first_values={name.removeprefix("min."): row[name] for name in firsts},
            )
            for row in rows
        ),
        columns=tuple((field.name, str(field.type.type)) for field in opened.schema().fields),
    )


def commits_after(table: TablePath, snapshot_id: str) -> list[Commit]:
    """Return the commits between a version and that of the table, by its log.

    Raises:
        OSError: The log does not reach back so far.
    """
    commits = []
    for version in range(int(snapshot_id) + 1, int(str(table.snapshot_id)) + 1):
        with open_parquet(source_path(f"{table.place}/_delta_log/{version:020d}.json")) as log:
            actions = [json.loads(line) for line in log.read().splitlines()]
        added, removed = (
            tuple(
                TableFile(
                    uri=_uri(table.place, unquote(action[kind]["path"])),
                    partition=tuple((action[kind].get("partitionValues") or {}).items()),
                    first_values={},
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
