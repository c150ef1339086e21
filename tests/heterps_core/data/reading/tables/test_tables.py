"""Tables of Delta and Iceberg: which files count, in which order, and what is refused."""

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
from heterps_core.errors import ConfigurationError, DataError
from tests.heterps_core.data.reading.tables.table_makers import (
    DAYS,
    SCHEMA,
    Delta,
    clicks,
    deltalake,
    in_time,
    row_ids,
)


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


def test_a_column_that_a_table_has_not_is_named(table, tmp_path):
    table.append(clicks(0, 8).take([1, 3, 5]), by=["day"])

    schema = replace(SCHEMA, categorical_columns=("town", "colour"))
    with pytest.raises(DataError, match="must have the columns colour; has row"):
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
    with pytest.raises(DataError, match="must have the day 2026-10-01, which the night trains on"):
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
    if isinstance(table, Delta):
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
    delta = Delta(tmp_path)
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


def test_files_in_the_folder_of_a_table_name_the_table(tmp_path):
    delta = Delta(tmp_path)
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
