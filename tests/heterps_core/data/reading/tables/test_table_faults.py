"""Tables that are not as a run needs them: one line says so, and nothing is half read."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa
import pytest

from heterps_core.data.manifest import folder_of, read_manifest
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.reading.days import find_night
from heterps_core.data.reading.readers import list_source_files
from heterps_core.data.reading.tables.listing import pinned
from heterps_core.data.reading.tables.table_path import TablePath
from heterps_core.errors import DataError
from tests.heterps_core.data.reading.tables.table_makers import (
    DAYS,
    SCHEMA,
    Delta,
    Iceberg,
    catalogs,
    clicks,
    deltalake,
    in_time,
    row_ids,
)

Config = pytest.importorskip("pyiceberg.utils.config").Config
CommitFailedException = pytest.importorskip("pyiceberg.exceptions").CommitFailedException


def refusal(read, *arguments, **named):
    with pytest.raises(DataError) as caught:
        read(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_table_without_the_partition_of_a_day_names_the_days_that_it_has(table):
    table.append(clicks(0, 4), by=["day"])

    assert "must have the day 2026-11-03, which 2026-11-02 is judged on" in refusal(
        find_night, TablePath.parse(table.data), DAYS[1]
    )


def test_a_snapshot_of_iceberg_that_has_expired_is_refused_with_those_that_are_there(tmp_path, catalog):
    iceberg = Iceberg(tmp_path)
    iceberg.append(clicks(0, 4))
    expired = pinned(in_time(iceberg.data))
    iceberg.append(clicks(4, 8))
    table = iceberg.catalog.load_table("shop.clicks")
    table.maintenance.expire_snapshots().by_id(int(expired.snapshot_id)).commit()

    said = refusal(prepare_dataset, expired, schema=SCHEMA, out_dir=tmp_path / "rows")

    assert f"has no snapshot {expired.snapshot_id}; write rows, or name one that has not expired" in said
    assert pinned(in_time(iceberg.data)).snapshot_id in said


def test_a_version_of_delta_of_which_files_were_vacuumed_leaves_prepared_rows_as_they_were(tmp_path):
    delta = Delta(tmp_path)
    delta.append(clicks(0, 20))
    before = pinned(in_time(delta.data))
    kept = prepare_dataset(before, schema=SCHEMA, out_dir=tmp_path / "rows").manifest
    deltalake.write_deltalake(f"{tmp_path}/clicks", clicks(20, 40), mode="overwrite")
    opened = deltalake.DeltaTable(f"{tmp_path}/clicks")
    opened.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)

    said = refusal(prepare_dataset, before, schema=SCHEMA, out_dir=tmp_path / "rows", eval_fraction=0.5)

    assert "cannot be read: No such file or directory" in said
    assert read_manifest(folder_of(tmp_path / "rows")) == kept


def test_a_catalog_whose_server_is_away_is_refused_in_one_line(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("PYICEBERG_CATALOG__HERE__URI", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(catalogs, "_ENV_CONFIG", Config())

    assert "snapshot (the newest) cannot be listed: " in refusal(
        list_source_files, "iceberg://here/shop.clicks"
    )


def test_a_column_of_delta_that_was_dropped_between_snapshots_is_named(tmp_path):
    delta = Delta(tmp_path)
    delta.append(clicks(0, 20))
    before = pinned(in_time(delta.data))
    without = clicks(0, 20).drop(["town"])
    deltalake.write_deltalake(f"{tmp_path}/clicks", without, mode="overwrite", schema_mode="overwrite")

    said = refusal(prepare_dataset, in_time(delta.data), schema=SCHEMA, out_dir=tmp_path / "rows")

    assert "must have the columns town; has row, clicked, day" in said
    assert prepare_dataset(before, schema=SCHEMA, out_dir=tmp_path / "rows").manifest.num_rows == 20


def test_a_column_of_an_older_snapshot_of_iceberg_has_its_name_of_then_and_of_now(tmp_path, catalog):
    iceberg = Iceberg(tmp_path)
    iceberg.append(clicks(0, 20))
    before = pinned(in_time(iceberg.data))
    with iceberg.catalog.load_table("shop.clicks").update_schema() as update:
        update.rename_column("town", "city")
    iceberg.append(clicks(20, 40).rename_columns(["row", "clicked", "city", "day"]))

    then, now = (
        prepare_dataset(
            before,
            schema=replace(SCHEMA, categorical_columns=(name,)),
            buckets_per_slot=31,
            out_dir=tmp_path / name,
        )
        for name in ("town", "city")
    )

    assert then.batch(pa.array(range(20)).to_numpy()).ids.all()
    assert now.batch(pa.array(range(20)).to_numpy()).ids.all()


def test_each_listing_beside_two_writers_holds_whole_appends(table):
    table.append(clicks(0, 4))
    is_over = threading.Event()

    def write(first):
        for start in range(first, first + 32, 4):
            while True:
                try:
                    table.append(clicks(start, start + 4))
                    break
                except CommitFailedException:  # the other writer was first
                    pass

    def listings():
        found = []
        while not is_over.is_set():
            found.append(row_ids(list_source_files(in_time(table.data))))
        return found

    with ThreadPoolExecutor() as pool:
        listed = pool.submit(listings)
        try:
            for writing in [pool.submit(write, first) for first in (100, 200)]:
                writing.result()
        finally:
            is_over.set()

    for rows in listed.result():
        assert len(rows) == len({*rows})
        assert all({*range(row - row % 4, row - row % 4 + 4)} <= {*rows} for row in rows)
    assert sorted(row_ids(list_source_files(in_time(table.data)))) == [
        *range(4),
        *range(100, 132),
        *range(200, 232),
    ]
