"""Tables of Delta and Iceberg: which files count, in which order, and what is refused."""

import json
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.reading.days import find_night, partitions_of, table_changes
from heterps_core.data.reading.readers import list_source_files
from heterps_core.data.reading.tables.listing import pinned
from heterps_core.data.reading.tables.table_path import TablePath
from heterps_core.data.schema import DataSchema
from heterps_core.errors import ConfigurationError, DataError

deltalake = pytest.importorskip("deltalake")
catalogs = pytest.importorskip("pyiceberg.catalog")
Config = pytest.importorskip("pyiceberg.utils.config").Config
_dataframe_to_data_files = pytest.importorskip("pyiceberg.io.pyarrow")._dataframe_to_data_files
_OverwriteFiles = pytest.importorskip("pyiceberg.table.update.snapshot")._OverwriteFiles
snapshots = pytest.importorskip("pyiceberg.table.snapshots")

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


class _Delta:
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


class _Iceberg:
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


@pytest.fixture
def catalog(tmp_path, monkeypatch):
    monkeypatch.setenv("PYICEBERG_CATALOG__HERE__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__HERE__WAREHOUSE", f"file://{tmp_path}")
    # pyiceberg reads the environment when it is imported.
    monkeypatch.setattr(catalogs, "_ENV_CONFIG", Config())


@pytest.fixture(params=[_Delta, _Iceberg], ids=["delta", "iceberg"])
def table(request, tmp_path, catalog):
    return request.param(tmp_path)


def row_ids(files):
    return [row for file in files for row in pq.ParquetFile(file).read(["row"])["row"].to_pylist()]


def in_time(data, snapshot=None):
    return replace(TablePath.parse(data), snapshot_id=snapshot, time_column="row")


def test_a_table_holds_the_rows_of_the_same_parquet_also_once_rows_were_appended(table, tmp_path):
    table.append(clicks(0, 40))
    table.append(clicks(40, 60))
    before = pinned(in_time(table.data))
    plain = tmp_path / "plain"
    plain.mkdir()
    pq.write_table(clicks(0, 40), plain / "0.parquet")
    pq.write_table(clicks(40, 60), plain / "1.parquet")
    table.append(clicks(60, 80))

    expected, found = (
        prepare_dataset(source, schema=SCHEMA, out_dir=tmp_path / f"rows-{name}")
        for name, source in (("plain", plain), ("table", before))
    )

    rows = [expected.batch_rows(0, batch, batch_size=8, seed=3) for batch in range(expected.num_batches(8))]
    assert found.manifest.features == expected.manifest.features
    assert found.manifest.numeric_transform == expected.manifest.numeric_transform
    for each in rows:
        ours, theirs = found.batch(each), expected.batch(each)
        assert ours.dense.equal(theirs.dense)
        assert ours.ids.equal(theirs.ids)
        assert ours.labels.equal(theirs.labels)
    assert row_ids(list_source_files(in_time(table.data))) == list(range(80))


WITH_AGE = replace(SCHEMA, numeric_columns=("age",), categorical_columns=("town", "shop"))


def newer(first, stop):
    rows = clicks(first, stop)
    ages = pa.array([float(row) for row in range(first, stop)])
    return rows.append_column("age", ages).append_column("shop", pa.array(["corner"] * len(rows)))


def test_a_column_that_a_table_got_later_is_missing_in_older_files(table, tmp_path):
    table.append(clicks(0, 40))
    table.widen(newer(40, 80))
    plain = tmp_path / "plain.parquet"
    nothing = pa.nulls(40)
    older = clicks(0, 40).append_column("age", nothing).append_column("shop", nothing)
    pq.write_table(pa.concat_tables([older, newer(40, 80)], promote_options="permissive"), plain)

    expected, found = (
        prepare_dataset(source, schema=WITH_AGE, buckets_per_slot=31, out_dir=tmp_path / f"rows-{name}")
        for name, source in (("plain", plain), ("table", in_time(table.data)))
    )

    rows = np.arange(80)
    assert found.batch(rows).dense.equal(expected.batch(rows).dense)
    assert found.batch(rows).ids.equal(expected.batch(rows).ids)
    assert (expected.batch(rows).ids[:40, 1] == 0).all()
    assert (expected.batch(rows).ids[40:, 1] != 0).all()


def test_a_column_that_a_table_has_not_or_stores_in_folders_is_named(table, tmp_path):
    table.append(clicks(0, 8).take([1, 3, 5]), by=["day"])

    for name in ("colour", "day") if isinstance(table, _Delta) else ("colour",):
        schema = replace(SCHEMA, categorical_columns=("town", name))
        with pytest.raises(DataError, match=f"must have the columns {name}; has row"):
            prepare_dataset(in_time(table.data), schema=schema, out_dir=tmp_path / "rows")


def test_rows_that_were_deleted_are_in_no_file_of_the_newest_snapshot(table):
    for first in (0, 20, 40):
        table.append(clicks(first, first + 20))
    before = pinned(in_time(table.data))

    table.delete("row >= 5 and row < 25")

    assert sorted(row_ids(list_source_files(in_time(table.data)))) == [*range(5), *range(25, 60)]
    assert row_ids(list_source_files(before)) == list(range(60))


def test_partitions_are_days_whose_files_are_trained_in_the_order_of_time(table, tmp_path):
    for first in (7, 2, 5, 0):
        rows = clicks(first, first + 2)
        table.append(rows.set_column(3, "day", [[str(DAYS[first >= 5])] * 2]), by=["day"])

    night = find_night(in_time(table.data), None)
    prepared = prepare_dataset(
        night.train_files, eval_source=night.eval_files, schema=SCHEMA, out_dir=tmp_path / "rows"
    )

    assert (prepared.num_train_rows, prepared.manifest.num_eval_rows) == (4, 4)

    assert list(partitions_of(table.data)) == DAYS
    assert (row_ids(night.train_files), row_ids(night.eval_files)) == (
        [0, 1, 2, 3],
        [5, 6, 7, 8],
    )
    with pytest.raises(DataError, match="must have a partition of that day, which the night trains on"):
        find_night(table.data, date(2026, 10, 1))


def test_rows_that_come_later_are_told_from_rows_that_move_or_change(table):
    table.append(clicks(0, 10), by=["day"])
    trained = pinned(TablePath.parse(table.data))
    table.append(clicks(10, 11))
    table.compact()
    table.append(clicks(20, 24))
    late = pinned(trained.parse(table.data))

    added, changed = table_changes(late, trained.snapshot_id)

    assert {day: row_ids(files) for day, files in added.items()} == {DAYS[0]: [10, 20, 22], DAYS[1]: [21, 23]}
    assert not changed

    table.delete("row == 21")
    added, changed = table_changes(TablePath.parse(table.data), late.snapshot_id)
    assert (added, [*changed]) == ({}, [DAYS[1]])
    # The files that came for that day still hold the row.
    added, changed = table_changes(TablePath.parse(table.data), trained.snapshot_id)
    assert ([*added], [*changed]) == ([DAYS[0]], [DAYS[1]])


def test_changes_since_a_snapshot_that_is_gone_are_not_known(table):
    table.append(clicks(0, 4), by=["day"])
    trained = pinned(TablePath.parse(table.data))
    table.append(clicks(4, 8))
    if isinstance(table, _Delta):
        (table.folder / "clicks" / "_delta_log" / f"{1:020d}.json").unlink()
        deltalake.DeltaTable(f"{table.folder}/clicks", version=0)

    with pytest.raises(DataError) as caught:
        table_changes(replace(trained, snapshot_id="1"), "0")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("snapshot", ["99", "newest"])
def test_a_snapshot_that_is_not_there_is_refused_in_one_line(table, snapshot):
    table.append(clicks(0, 4))
    with pytest.raises((DataError, ConfigurationError), match=r"snapshot") as caught:
        list_source_files(in_time(table.data, snapshot))
    assert "\n" not in str(caught.value)


def test_a_partition_with_odd_characters_is_found(tmp_path):
    delta = _Delta(tmp_path)
    delta.append(clicks(0, 6).append_column("hour", pa.array(["a b:c%ü"] * 6)), by=["hour"])
    assert all(path.is_file() for path in list_source_files(delta.data))


@pytest.mark.parametrize(
    ("name", "problem"),
    [("delta:///no/such/table", "cannot be listed"), ("iceberg://away/shop.clicks", "cannot be listed")],
)
def test_a_table_or_catalog_that_is_away_is_refused_in_one_line(name, problem):
    with pytest.raises(DataError, match=problem) as caught:
        list_source_files(name)
    assert "\n" not in str(caught.value)


def test_columns_of_delta_that_are_mapped_are_refused(tmp_path):
    log = tmp_path / "clicks/_delta_log"
    log.mkdir(parents=True)
    field = {"name": "row", "type": "long", "nullable": True}
    field["metadata"] = {"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "col-1"}
    actions = [
        {"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}},
        {
            "metaData": {
                "id": "1",
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps({"type": "struct", "fields": [field]}),
                "partitionColumns": [],
                "configuration": {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "1"},
            }
        },
    ]
    (log / f"{0:020d}.json").write_text("\n".join(map(json.dumps, actions)))
    with pytest.raises(DataError, match="must store columns by their names"):
        list_source_files(f"delta://{tmp_path}/clicks")


def test_deletion_vectors_of_delta_are_refused_with_the_statement_that_purges_them(tmp_path):
    delta = _Delta(tmp_path)
    delta.append(clicks(0, 4))
    folder = tmp_path / "clicks"
    (file,) = folder.glob("*.parquet")
    vector = {"storageType": "i", "pathOrInlineDv": INLINE_VECTOR, "sizeInBytes": 34, "cardinality": 1}
    add = {"path": file.name, "partitionValues": {}, "size": file.stat().st_size, "modificationTime": 1}
    add["stats"] = json.dumps({"numRecords": 4})
    features = ["deletionVectors"]
    actions = [
        {
            "protocol": {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": features,
                "writerFeatures": features,
            }
        },
        {"remove": {"path": file.name, "dataChange": True, "deletionTimestamp": 1}},
        {"add": add | {"dataChange": True, "deletionVector": vector}},
    ]
    (folder / f"_delta_log/{1:020d}.json").write_text("\n".join(map(json.dumps, actions)))
    with pytest.raises(DataError, match=r"REORG TABLE delta\.`.*clicks` APPLY"):
        list_source_files(delta.data)


def test_a_column_of_iceberg_that_was_renamed_is_refused(tmp_path, catalog):
    iceberg = _Iceberg(tmp_path)
    iceberg.append(clicks(0, 4))
    with iceberg.catalog.load_table("shop.clicks").update_schema() as update:
        update.rename_column("town", "city")
    with pytest.raises(DataError, match="column city must have had one name"):
        list_source_files(iceberg.data)


def _inline_vector(row):
    """Return a deletion vector of one row: base85 by Z85 of a portable 64-bit roaring bitmap with Delta's mark."""
    bitmap = np.array([12346], "<u4").tobytes() + np.array([1], "<u4").tobytes()
    bitmap += (
        np.array([0, 0], "<u2").tobytes() + np.array([16], "<u4").tobytes() + np.array([row], "<u2").tobytes()
    )
    data = (
        np.array([1681511377], "<u4").tobytes()
        + np.array([1], "<u8").tobytes()
        + np.array([0], "<u4").tobytes()
    )
    data += bitmap
    data += b"\0" * (-len(data) % 4)
    digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    words = np.frombuffer(data, ">u4").tolist()
    return "".join(digits[word // 85**power % 85] for word in words for power in (4, 3, 2, 1, 0))


INLINE_VECTOR = _inline_vector(1)


def test_files_in_the_folder_of_a_table_name_the_table(tmp_path):
    delta = _Delta(tmp_path)
    delta.append(clicks(0, 4))
    with pytest.raises(DataError, match="name the table as delta://"):
        list_source_files(str(Path(tmp_path, "clicks")))


@pytest.mark.parametrize(
    ("data", "module", "package"),
    [("delta:///clicks", "delta", "deltalake"), ("iceberg://here/shop.clicks", "iceberg", "pyiceberg")],
)
def test_a_library_that_is_not_installed_is_named_with_its_extra(data, module, package, monkeypatch):
    from heterps_core.data.reading import tables

    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"{tables.__name__}.{module}", raising=False)
    monkeypatch.delattr(tables, module, raising=False)

    with pytest.raises(ConfigurationError, match=rf"pip install 'heterps\[{module}\]'"):
        list_source_files(data)
