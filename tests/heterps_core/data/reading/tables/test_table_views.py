"""Rows of files as their table shows them: renamed columns, partitions, deleted rows."""

import json
from dataclasses import replace
from datetime import date

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.reading.days import find_night, table_changes
from heterps_core.data.reading.readers import list_source_files
from heterps_core.data.reading.tables.listing import pinned
from heterps_core.data.reading.tables.table_path import TablePath
from heterps_core.errors import DataError
from tests.heterps_core.data.reading.tables.table_makers import (
    DAYS,
    SCHEMA,
    Delta,
    Iceberg,
    clicks,
    delete_by_position,
    delete_by_value,
    in_time,
    row_ids,
)

WITH_CITY = replace(SCHEMA, categorical_columns=("city",))
WITH_REGION = replace(SCHEMA, categorical_columns=("town", "region"))


def prepared(source, schema, folder):
    return prepare_dataset(source, schema=schema, buckets_per_slot=31, out_dir=folder)


def assert_same_rows(found, expected, num_rows):
    assert (found.num_train_rows, found.num_eval_rows) == (expected.num_train_rows, expected.num_eval_rows)
    ours, theirs = (each.batch(np.arange(num_rows)) for each in (found, expected))
    assert ours.ids.equal(theirs.ids)
    assert ours.dense.equal(theirs.dense)
    assert ours.labels.equal(theirs.labels)


def as_parquet(rows, folder):
    pq.write_table(rows, folder / "plain.parquet")
    return folder / "plain.parquet"


def renamed(rows, **names):
    return rows.rename_columns([names.get(name, name) for name in rows.column_names])


def test_a_renamed_column_of_iceberg_is_the_same_column(tmp_path, catalog):
    iceberg = Iceberg(tmp_path)
    iceberg.append(clicks(0, 40))
    before = pinned(in_time(iceberg.data))
    with iceberg.catalog.load_table("shop.clicks").update_schema() as update:
        update.rename_column("town", "city")
    iceberg.append(renamed(clicks(40, 80), town="city"))
    plain = as_parquet(renamed(clicks(0, 80), town="city"), tmp_path)

    found = prepared(in_time(iceberg.data), WITH_CITY, tmp_path / "found")

    assert_same_rows(found, prepared(plain, WITH_CITY, tmp_path / "expected"), 80)
    assert (found.batch(np.arange(80)).ids != 0).all()
    assert prepared(before, SCHEMA, tmp_path / "before").manifest.num_rows == 40
    with pytest.raises(DataError, match="must have the columns town; has row, clicked, city, day"):
        prepared(in_time(iceberg.data), SCHEMA, tmp_path / "found")


def test_columns_of_iceberg_that_changed_their_names_with_each_other_are_told_apart(tmp_path, catalog):
    iceberg = Iceberg(tmp_path)
    iceberg.append(clicks(0, 40))
    unnamed = prepared(in_time(iceberg.data), SCHEMA, tmp_path / "found").manifest.fingerprint
    for name, other in (("town", "swapped"), ("day", "town"), ("swapped", "day")):
        with iceberg.catalog.load_table("shop.clicks").update_schema() as update:
            update.rename_column(name, other)
    plain = as_parquet(renamed(clicks(0, 40), town="day", day="town"), tmp_path)

    found = prepared(in_time(iceberg.data), SCHEMA, tmp_path / "found")

    assert found.manifest.fingerprint != unnamed
    assert_same_rows(found, prepared(plain, SCHEMA, tmp_path / "expected"), 40)


def test_a_column_of_iceberg_that_was_dropped_is_none_of_the_table_and_another_of_its_name_is_new(
    tmp_path, catalog
):
    iceberg = Iceberg(tmp_path)
    iceberg.append(clicks(0, 40))
    before = pinned(in_time(iceberg.data))
    with iceberg.catalog.load_table("shop.clicks").update_schema() as update:
        update.delete_column("town")
    with pytest.raises(DataError, match="must have the columns town; has row, clicked, day"):
        prepared(in_time(iceberg.data), SCHEMA, tmp_path / "none")
    iceberg.widen(clicks(40, 80))

    ids = prepared(in_time(iceberg.data), SCHEMA, tmp_path / "new").batch(np.arange(80)).ids[:, 0]

    assert not ids[:40].any()
    assert ids[40:].all()
    assert prepared(before, SCHEMA, tmp_path / "old").batch(np.arange(40)).ids.all()


FIELDS = ("row", "clicked", "town", "region")


def mapped_delta(folder, mode, rows, *, region="eu", partition="region"):
    """Write a table of one file in which columns have other names, as Spark does where columns are mapped."""
    log = folder / "clicks/_delta_log"
    log.mkdir(parents=True)
    inner = {name: f"col-{number}" for number, name in enumerate(FIELDS, start=1)}
    fields = [
        {
            "name": partition if name == "region" else name,
            "type": "long" if name in FIELDS[:2] else "string",
            "nullable": True,
            "metadata": {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": inner[name]},
        }
        for number, name in enumerate(FIELDS, start=1)
    ]
    stored = [
        pa.field(inner[name], rows.schema.field(name).type, metadata={"PARQUET:field_id": str(number)})
        for number, name in enumerate(FIELDS[:3], start=1)
    ]
    path = folder / "clicks/part.parquet"
    pq.write_table(pa.table(rows.select(FIELDS[:3]).columns, schema=pa.schema(stored)), path)
    settings = {"delta.columnMapping.mode": mode, "delta.columnMapping.maxColumnId": str(len(FIELDS))}
    statistics = {"numRecords": len(rows), "minValues": {"col-1": 0}, "nullCount": {"col-1": 0}}
    actions = [
        {"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}},
        {
            "metaData": {
                "id": "1",
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps({"type": "struct", "fields": fields}),
                "partitionColumns": [partition],
                "configuration": settings,
            }
        },
        {
            "add": {
                "path": path.name,
                "partitionValues": {inner["region"]: region},
                "size": path.stat().st_size,
                "modificationTime": 1,
                "dataChange": True,
                "stats": json.dumps(statistics),
            }
        },
    ]
    (log / f"{0:020d}.json").write_text("\n".join(map(json.dumps, actions)))
    return f"delta://{folder}/clicks"


@pytest.mark.parametrize("mode", ["name", "id"])
def test_columns_of_delta_that_are_mapped_are_found_in_its_files(mode, tmp_path):
    rows = clicks(0, 40).append_column("region", pa.array(["eu"] * 40))
    data = mapped_delta(tmp_path, mode, rows)

    found = prepared(in_time(data), WITH_REGION, tmp_path / "found")

    expected = prepared(as_parquet(rows, tmp_path), WITH_REGION, tmp_path / "expected")
    assert_same_rows(found, expected, 40)


def by_region(first, stop):
    regions = [("eu", "us", None)[row % 3] for row in range(first, stop)]
    return clicks(first, stop).append_column("region", pa.array(regions))


def test_a_partition_of_a_table_is_a_column_of_its_rows(table, tmp_path):
    table.append(by_region(0, 60), by=["region"])
    files = list_source_files(table.data)
    plain = as_parquet(by_region(0, 60).take(row_ids(files)), tmp_path)
    schema = replace(WITH_REGION, time_column=None)

    found = prepared(files, schema, tmp_path / "found")

    assert_same_rows(found, prepared(plain, schema, tmp_path / "expected"), 60)
    assert (found.batch(np.arange(60)).ids[:, 1] == 0).sum() == 20


@pytest.mark.parametrize("name", ["region", "Region"])
def test_a_folder_of_plain_parquet_is_a_column_of_its_rows(name, tmp_path):
    rows = by_region(0, 60)
    for number, value in enumerate(("eu", "us", "__HIVE_DEFAULT_PARTITION__")):
        for half in (0, 1):
            folder = tmp_path / f"rows/day={DAYS[half]}/{name}={value}"
            folder.mkdir(parents=True)
            part = rows.take([row for row in range(30 * half, 30 * half + 30) if row % 3 == number])
            pq.write_table(part.drop(["region", "day"]), folder / "part.parquet")
    schema = replace(WITH_REGION, time_column=None)
    night = find_night(str(tmp_path / "rows"), None)

    found = prepared(night.train_files, schema, tmp_path / "found")

    expected = by_region(0, 30).take(row_ids(night.train_files))
    assert_same_rows(found, prepared(as_parquet(expected, tmp_path), schema, tmp_path / "expected"), 30)


def test_a_folder_that_names_no_number_is_no_number(tmp_path):
    folder = tmp_path / "region=eu"
    folder.mkdir()
    schema = replace(SCHEMA, numeric_columns=("row", "region"))
    with pytest.raises(DataError, match="row 1: column region must be a finite number or empty, got 'eu'"):
        prepared(as_parquet(clicks(0, 4), folder), schema, tmp_path / "rows")


def mark_deleted(delta, folder):
    """Delete row 1 of the only file by a deletion vector, as Spark does."""
    (file,) = folder.glob("*.parquet")
    vector = {"storageType": "i", "pathOrInlineDv": INLINE_VECTOR, "sizeInBytes": 34, "cardinality": 1}
    add = {"path": file.name, "partitionValues": {}, "size": file.stat().st_size, "modificationTime": 1}
    add["stats"] = json.dumps({"numRecords": 40, "minValues": {"row": 0}, "nullCount": {"row": 0}})
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


def test_rows_that_deletion_vectors_name_are_not_trained(tmp_path):
    delta = Delta(tmp_path)
    delta.append(clicks(0, 40))
    before = pinned(in_time(delta.data))
    assert prepared(in_time(delta.data), SCHEMA, tmp_path / "rows").manifest.num_rows == 40
    mark_deleted(delta, tmp_path / "clicks")
    left = [0, *range(2, 40)]

    found = prepared(in_time(delta.data), SCHEMA, tmp_path / "rows")

    plain = as_parquet(clicks(0, 40).take(left), tmp_path)
    assert_same_rows(found, prepared(plain, SCHEMA, tmp_path / "expected"), 39)
    assert row_ids(list_source_files(in_time(delta.data))) == left
    assert row_ids(list_source_files(before)) == [*range(40)]


def test_rows_that_position_deletes_name_are_not_trained(tmp_path, catalog):
    iceberg = Iceberg(tmp_path)
    for first in (0, 20):
        iceberg.append(clicks(first, first + 20))
    trained = pinned(in_time(iceberg.data))
    assert prepared(trained, SCHEMA, tmp_path / "rows").manifest.num_rows == 40
    for rows in ((3, 4, 25), (4, 39)):
        delete_by_position(iceberg, rows)
    left = [row for row in range(40) if row not in (3, 4, 25, 39)]

    found = prepared(in_time(iceberg.data), SCHEMA, tmp_path / "rows")

    plain = as_parquet(clicks(0, 40).take(left), tmp_path)
    assert_same_rows(found, prepared(plain, SCHEMA, tmp_path / "expected"), 36)
    assert row_ids(list_source_files(trained)) == [*range(40)]
    # A model that reads the rows later needs no delete file.
    assert type(found).open(tmp_path / "rows").batch(np.arange(36)).labels.tolist() == [
        row % 2 for row in left
    ]


def test_a_day_with_rows_that_position_deletes_name_is_not_one_that_rows_came_to(tmp_path, catalog):
    iceberg = Iceberg(tmp_path)
    iceberg.append(clicks(0, 20), by=["day"])
    trained = pinned(in_time(iceberg.data))
    iceberg.append(clicks(20, 40))
    delete_by_position(iceberg, [22])

    added, changed = table_changes(in_time(iceberg.data), trained.snapshot_id)

    assert {day: row_ids(files) for day, files in added.items()} == {DAYS[1]: [*range(21, 40, 2)]}
    assert [*changed] == [date(2026, 11, 1)]


def test_equality_deletes_are_refused_with_the_statement_that_compacts_them(tmp_path, catalog):
    iceberg = Iceberg(tmp_path)
    iceberg.append(clicks(0, 20))
    delete_by_value(iceberg, [3])

    with pytest.raises(DataError, match=r"CALL here\.system\.rewrite_data_files") as caught:
        list_source_files(iceberg.data)
    assert "\n" not in str(caught.value)


def test_a_query_over_deleted_rows_is_refused(tmp_path, catalog):
    pytest.importorskip("duckdb")
    from heterps_core.data.row_query import RowQuery

    iceberg = Iceberg(tmp_path)
    iceberg.append(clicks(0, 20))
    query = RowQuery(path=tmp_path / "rows.sql", text="SELECT * FROM rows ORDER BY row")
    files = list_source_files(in_time(iceberg.data))
    made = query.result(files, day=None, schema=SCHEMA, folder=tmp_path / "made")
    assert pq.read_table(made).num_rows == 20
    delete_by_position(iceberg, [3])

    files = list_source_files(in_time(iceberg.data))
    with pytest.raises(DataError, match="has 1 deleted rows or renamed columns of its table"):
        query.result(files, day=None, schema=SCHEMA, folder=tmp_path / "made")


def test_rows_that_came_to_a_table_of_mapped_columns_are_of_the_day_of_its_partition(tmp_path):
    rows = clicks(0, 20).append_column("region", pa.array(["eu"] * 20))
    data = mapped_delta(tmp_path, "name", rows, region="20261101", partition="day")
    log = tmp_path / "clicks/_delta_log"
    (action,) = [json.loads(line) for line in (log / f"{0:020d}.json").read_text().splitlines()][2:]
    later = tmp_path / "clicks/later.parquet"
    later.write_bytes((tmp_path / "clicks/part.parquet").read_bytes())
    (log / f"{1:020d}.json").write_text(json.dumps({"add": action["add"] | {"path": later.name}}))

    added, changed = table_changes(TablePath.parse(data), "0")

    assert {day: row_ids(files) for day, files in added.items()} == {DAYS[0]: [*range(20)]}
    assert not changed


def test_a_day_of_a_table_of_mapped_columns_whose_file_was_removed_has_changed(tmp_path):
    rows = clicks(0, 20).append_column("region", pa.array(["eu"] * 20))
    data = mapped_delta(tmp_path, "name", rows, region="20261101", partition="day")
    log = tmp_path / "clicks/_delta_log"
    (action,) = [json.loads(line) for line in (log / f"{0:020d}.json").read_text().splitlines()][2:]
    removed = {key: action["add"][key] for key in ("path", "partitionValues", "dataChange")}
    (log / f"{1:020d}.json").write_text(json.dumps({"remove": removed | {"deletionTimestamp": 2}}))

    added, changed = table_changes(TablePath.parse(data), "0")

    assert not added
    assert [*changed] == [DAYS[0]]
