import gzip
import shutil
from dataclasses import replace
from datetime import date
from pathlib import Path

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

from heterps_core.data.manifest import FORMAT_VERSION, MANIFEST_NAME
from heterps_core.data.synthetic.click_stream import write_click_days, write_click_stream
from heterps_core.errors import ConfigurationError, DataError
from infra.workspace import Workspace
from tasks.data import (
    KEPT_NIGHTS,
    prepare_data,
)
from tasks.running.start import Start
from tasks.sources import ClickSource
from tests.heterps_core.data.synthetic_rows import held_out_labels
from tests.moto_server import empty_cloud


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return write_click_stream(tmp_path_factory.mktemp("stream") / "clicks.tsv", num_rows=3_000, seed=1)


def test_a_source_is_prepared_in_the_workspace_and_reused(stream, tmp_path):
    workspace = Workspace(root=tmp_path).create()

    first = prepare_data.fn(workspace, ClickSource(data=str(stream.path)))
    written = (tmp_path / "data").stat().st_mtime_ns
    second = prepare_data.fn(workspace, ClickSource(data=str(stream.path)))

    assert first == second
    assert first.open().manifest.num_rows == 3_000
    assert (tmp_path / "data").stat().st_mtime_ns == written


def test_a_missing_source_is_reported_without_reading(tmp_path):
    with pytest.raises(DataError, match=r"none\.tsv"):
        ClickSource(data=str(tmp_path / "none.tsv")).check()


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    folder = tmp_path_factory.mktemp("days")
    write_click_days(folder, first_day=date(2026, 11, 1), num_days=3, rows_per_day=700, seed=1)
    return folder


def prepare_night(workspace, folder, day, *, prepare_sql=None, late_rows="tell", **tables):
    source = ClickSource(data=str(folder), prepare_sql=prepare_sql)
    start = Start(reason="", **tables)
    return prepare_data.fn(workspace, source, night=source.night(day), start=start, late_rows=late_rows)


def test_a_night_is_trained_on_its_day_and_judged_on_the_next(days, tmp_path):
    clicks = prepare_night(Workspace(root=tmp_path).create(), days, "2026-11-01")
    dataset = clicks.open()

    sources = [Path(source.path).parent.name for source in dataset.manifest.sources]
    assert sources == ["day=2026-11-01", "day=2026-11-02"]
    assert (dataset.num_train_rows, dataset.num_eval_rows) == (700, 700)
    probabilities = np.load(days / "day=2026-11-02" / "_clicks.tsv.gz.probabilities.npy")
    assert clicks.best_reachable.auc == pytest.approx(roc_auc_score(held_out_labels(dataset), probabilities))


def test_the_latest_night_is_the_one_before_the_last_day(days):
    assert ClickSource(data=str(days)).night(None).day == date(2026, 11, 2)


def test_rows_of_a_night_are_prepared_as_the_model_that_goes_on_with_them_asks(days, tmp_path):
    workspace = Workspace(root=tmp_path).create()
    first = prepare_night(workspace, days, "2026-11-01").open().manifest

    second = prepare_night(
        workspace, days, "2026-11-02", slot_rows=(77,) * 26, numeric_transform=first.numeric_transform
    )

    manifest = second.open().manifest
    assert set(manifest.features.slot_rows) == {77}
    assert manifest.numeric_transform == first.numeric_transform


@pytest.mark.parametrize(
    ("day", "content", "problem"),
    [
        ("2026-11-01", b"1\tnot\tenough\n", r"day 2026-11-01, .*clicks\.tsv\.gz, line 1: expected 40 fields"),
        ("2026-11-02", b"", r"day 2026-11-02, .*clicks\.tsv\.gz: must hold at least one row"),
        (
            "2026-11-02",
            b"\x1f\x8bno gzip",
            r"day 2026-11-02, .*clicks\.tsv\.gz: the compressed stream is truncated",
        ),
    ],
    ids=["columns", "empty", "damaged"],
)
def test_a_bad_partition_is_reported_with_its_day_file_and_line(days, tmp_path, day, content, problem):
    copied = tmp_path / "days"
    shutil.copytree(days, copied)
    bad = copied / f"day={day}" / "clicks.tsv.gz"
    bad.write_bytes(gzip.compress(content) if content.endswith(b"\n") else content)

    with pytest.raises(DataError, match=problem) as caught:
        prepare_night(Workspace(root=tmp_path / "home").create(), copied, "2026-11-01")

    assert str(caught.value).endswith(
        "nothing was launched, and the champion stays: fix that day, or choose another"
    )


def test_a_bad_row_in_the_middle_of_a_day_is_reported_with_its_line(days, tmp_path):
    copied = tmp_path / "days"
    shutil.copytree(days, copied)
    bad = copied / "day=2026-11-02" / "clicks.tsv.gz"
    lines = gzip.decompress(bad.read_bytes()).splitlines()
    lines[411] = lines[411].replace(b"\t", b"\tmany", 1)
    bad.write_bytes(gzip.compress(b"\n".join(lines)))

    with pytest.raises(DataError, match=r"day 2026-11-02, .*, line 412: "):
        prepare_night(Workspace(root=tmp_path / "home").create(), copied, "2026-11-01")


def add_rows(folder, day, name, *, first):
    """Write ten more rows of a day; returns the file."""
    lines = gzip.decompress((folder / "day=2026-11-03" / "clicks.tsv.gz").read_bytes()).splitlines()
    path = folder / f"day={day}" / name
    path.write_bytes(gzip.compress(b"\n".join(lines[first : first + 10]) + b"\n"))
    return path


def test_rows_that_come_for_a_day_that_is_done_are_reported_or_trained_and_never_dropped(
    days, tmp_path, caplog
):
    copied, workspace = tmp_path / "days", Workspace(root=tmp_path / "home").create()
    shutil.copytree(days, copied)
    prepare_night(workspace, copied, "2026-11-01")
    assert "late rows" not in caplog.text

    add_rows(copied, "2026-11-02", "before_its_night.tsv.gz", first=0)
    late = add_rows(copied, "2026-11-01", "late.tsv.gz", first=10)
    reported = prepare_night(workspace, copied, "2026-11-02").open()

    assert reported.num_train_rows == 710
    assert (
        f"{late}: come since 2026-11-01 was trained on; late_rows=train trains it with 2026-11" in caplog.text
    )
    assert "before_its_night" not in caplog.text

    trained = prepare_night(workspace, copied, "2026-11-02", late_rows="train").open()

    assert trained.num_train_rows == 720
    assert trained.manifest.sources[0].path == str(late)
    assert "was trained on; trained with 2026-11-02" in caplog.text


def test_a_late_file_is_trained_once_and_one_that_was_changed_is_reported(days, tmp_path, caplog):
    copied, workspace = tmp_path / "days", Workspace(root=tmp_path / "home").create()
    shutil.copytree(days, copied)
    shutil.copytree(copied / "day=2026-11-03", copied / "day=2026-11-04")
    prepare_night(workspace, copied, "2026-11-01")
    add_rows(copied, "2026-11-01", "late.tsv.gz", first=10)
    prepare_night(workspace, copied, "2026-11-02", late_rows="train")
    add_rows(copied, "2026-11-02", "clicks.tsv.gz", first=0)
    caplog.clear()

    next_night = prepare_night(workspace, copied, "2026-11-03", late_rows="train").open()

    assert next_night.num_train_rows == 700
    assert "late.tsv.gz" not in caplog.text
    assert (
        "changed since 2026-11-02 was trained on; day=2026-11-02 again=True trains that day once"
        in caplog.text
    )


def test_late_rows_of_a_table_are_trained_and_those_that_only_moved_are_not(tmp_path, caplog):
    deltalake = pytest.importorskip("deltalake")
    place, workspace = str(tmp_path / "clicks"), Workspace(root=tmp_path / "home").create()
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"schema_version": 1, "name": "t", "label_column": "click", "categorical_columns": ["town"]}'
    )

    def append(day, num_rows):
        rows = {
            "click": [0, 1] * num_rows,
            "town": ["Ulm", "Bonn"] * num_rows,
            "day": [f"2026-11-0{day}"] * 2 * num_rows,
        }
        deltalake.write_deltalake(place, pa.table(rows), mode="append", partition_by=["day"])

    def night(day, **options):
        source = ClickSource(data=f"delta://{place}", schema_file=str(schema))
        source = replace(source, snapshot=source.table.snapshot_id)
        return prepare_data.fn(workspace, source, night=source.night(f"2026-11-0{day}"), **options).open()

    for day in (1, 1, 2, 3, 4):
        append(day, 10)
    assert night(1).num_train_rows == 40
    append(1, 3)
    deltalake.DeltaTable(place).optimize.compact()
    append(2, 5)

    assert night(2).num_train_rows == 30
    assert "come since 2026-11-01 was trained on; late_rows=train trains it with 2026-11-02" in caplog.text
    assert night(2, late_rows="train").num_train_rows == 36
    caplog.clear()
    deltalake.DeltaTable(place).delete("day = '2026-11-02' and town = 'Ulm'")

    assert night(3, late_rows="train").num_train_rows == 20
    assert (
        f"delta://{place}: changed since 2026-11-02 was trained on; day=2026-11-02 again=True" in caplog.text
    )
    assert "come since" not in caplog.text


def test_files_of_a_night_that_another_version_prepared_are_not_taken_for_late_ones(days, tmp_path, caplog):
    workspace = Workspace(root=tmp_path).create()
    before = prepare_night(workspace, days, "2026-11-01")
    manifest = Path(before.directory) / MANIFEST_NAME
    manifest.write_text(
        manifest.read_text().replace(f'"format_version": {FORMAT_VERSION}', '"format_version": 2')
    )

    assert prepare_night(workspace, days, "2026-11-02", late_rows="train").open().num_train_rows == 700

    assert "late rows" not in caplog.text


def test_a_bad_row_that_a_query_makes_names_the_query_and_the_day(days, tmp_path):
    workspace, query = Workspace(root=tmp_path).create(), tmp_path / "rows.sql"
    query.write_text(
        "SELECT * REPLACE (CASE WHEN $day = '2026-11-02' THEN '7' ELSE label END AS label) FROM rows"
    )

    with pytest.raises(DataError, match=rf"^what {query} returns \(day 2026-11-02, .*\): row 1: the label"):
        prepare_night(workspace, days, "2026-11-01", prepare_sql=str(query))


def test_a_query_makes_the_rows_of_both_days_and_its_results_go_with_the_nights(days, tmp_path, caplog):
    copied, workspace = tmp_path / "days", Workspace(root=tmp_path / "home").create()
    shutil.copytree(days, copied)
    shutil.copytree(copied / "day=2026-11-03", copied / "day=2026-11-04")
    query = tmp_path / "rows.sql"
    query.write_text("SELECT *, $day AS named FROM rows WHERE label = '1' OR I1 IS NULL")
    results = tmp_path / "home" / "data"

    first = prepare_night(workspace, copied, "2026-11-01", prepare_sql=str(query)).open()

    of_days = [gzip.decompress((copied / f"day=2026-11-0{n}" / "clicks.tsv.gz").read_bytes()) for n in (1, 2)]
    expected = [sum(line.startswith((b"1\t", b"0\t\t")) for line in text.splitlines()) for text in of_days]
    assert [first.num_train_rows, first.num_eval_rows] == expected
    assert 0 < expected[0] < 700
    paths = [Path(source.path) for source in first.manifest.sources]
    assert [pq.read_table(path)["named"][0].as_py() for path in paths] == ["2026-11-01", "2026-11-02"]

    late = add_rows(copied, "2026-11-01", "late.tsv.gz", first=10)
    second = prepare_night(workspace, copied, "2026-11-02", prepare_sql=str(query)).open()

    assert f"{late}: come since 2026-11-01 was trained on" in caplog.text
    assert "clicks.tsv.gz" not in caplog.text
    # What the first night was judged on is what the second one trains.
    assert second.manifest.sources[0].path == str(paths[1])
    assert len(list(results.glob("*-queried/*"))) == 3
    shutil.rmtree(first.directory)
    prepare_night(workspace, copied, "2026-11-03", prepare_sql=str(query))
    assert not paths[0].exists()
    assert len(list(results.glob("*-queried/*"))) == 3


def test_a_query_makes_the_rows_of_a_source_without_days(stream, tmp_path):
    workspace = Workspace(root=tmp_path).create()
    query = tmp_path / "rows.sql"
    query.write_text("SELECT * FROM rows LIMIT 500")
    source = ClickSource(data=str(stream.path), prepare_sql=str(query))

    clicks = prepare_data.fn(workspace, source)
    as_it_lies = prepare_data.fn(workspace, ClickSource(data=str(stream.path)))

    assert clicks.open().manifest.num_rows == 500
    assert as_it_lies.open().manifest.num_rows == 3_000
    labels = [dataset.open().targets(0, 400)[0].tolist() for dataset in (clicks, as_it_lies)]
    assert labels[0] == labels[1]
    assert source.name == f"{stream.path} through {query}"


def test_nights_of_a_bucket_are_prepared_as_those_of_a_folder(days, tmp_path, monkeypatch):
    """Text is converted into the workspace; only the days of the night are read."""
    workspace = Workspace(root=tmp_path).create()
    here = prepare_night(workspace, days, "2026-11-01").open().manifest
    with empty_cloud() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="clicks")
        for day in ("2026-11-01", "2026-11-02"):
            path = days / f"day={day}" / "clicks.tsv.gz"
            client.upload_file(str(path), "clicks", f"raw/dt={day}/hour=00/clicks.tsv.gz")

        source = ClickSource(data="s3://clicks/raw")
        source.check("2026-11-01")
        source.check_columns("2026-11-01")
        there = prepare_night(workspace, "s3://clicks/raw", "2026-11-01").open().manifest

    assert there.sources[0].path == "s3://clicks/raw/dt=2026-11-01/hour=00/clicks.tsv.gz"
    assert (there.num_train_rows, there.num_eval_rows) == (700, 700)
    assert there.numeric_transform == here.numeric_transform


def test_a_name_with_an_at_sign_is_no_user_of_a_bucket(stream, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(stream.path, "clicks@home.tsv")

    ClickSource(data="clicks@home.tsv").check()


def test_a_source_with_credentials_is_refused():
    with pytest.raises(ConfigurationError, match="must hold no credentials"):
        ClickSource(data="s3://AKIA:hush@clicks/raw").check()


def test_a_first_night_has_tables_for_the_values_of_its_day(tmp_path):
    write_click_days(tmp_path, first_day=date(2026, 11, 6), num_days=2, rows_per_day=16_500, seed=0)

    clicks = prepare_night(Workspace(root=tmp_path / "home").create(), tmp_path, "2026-11-06")

    # 16,500 / 8 = 2,062, which columns of more than 256 values get that hardly miss one.
    manifest = clicks.open().manifest
    assert set(manifest.features.slot_rows) == {1_024, 2_048}
    for column, rows in zip(manifest.columns, manifest.features.slot_rows, strict=True):
        assert (rows == 2_048) == (column.num_values > 256 and 16_500 * (1 - column.missing_share) >= 16_384)


@pytest.mark.parametrize(("rows", "is_reported"), [(256, True), (512, False)])
def test_columns_that_have_outgrown_the_tables_of_the_champion_are_reported(
    days, tmp_path, caplog, rows, is_reported
):
    caplog.set_level("INFO")

    prepare_night(Workspace(root=tmp_path).create(), days, "2026-11-01", slot_rows=(rows, *(1_024,) * 25))

    advice = (
        "the champion's tables are kept, but 1 of 26 columns have outgrown theirs: C1 has 256 rows and would get "
        "1,024; start_from=scratch trains a model with new ones, which have fewer collisions"
    )
    assert (advice in caplog.text) == is_reported


def test_prepared_nights_do_not_fill_the_disk(days, tmp_path):
    workspace = Workspace(root=tmp_path).create()
    for buckets in range(60, 70):
        clicks = prepare_night(workspace, days, "2026-11-01", slot_rows=(buckets,) * 26)

    assert len(list(workspace.data_directory.glob("*2026-11-01*"))) == KEPT_NIGHTS
    assert set(clicks.open().features.slot_rows) == {69}


def test_days_of_a_source_share_a_profile_within_a_week(tmp_path):
    # The 8th of November 2026 is a Sunday.
    write_click_days(tmp_path, first_day=date(2026, 11, 6), num_days=4, rows_per_day=20, seed=0)
    workspace = Workspace(root=tmp_path / "home").create()

    friday, saturday, sunday = (
        prepare_night(workspace, tmp_path, f"2026-11-0{number}").profiled_as for number in (6, 7, 8)
    )
    week = prepare_night(workspace, tmp_path, "2026-11-08", slot_rows=(2_048,) * 26).profiled_as

    assert friday == saturday == sunday == week
    assert friday.endswith("in 2026-W45")


def test_a_day_can_be_chosen_only_of_data_that_has_days(stream):
    for data in (None, str(stream.path)):
        with pytest.raises(ConfigurationError, match="day 2026-11-01 can be chosen only"):
            ClickSource(data=data).check("2026-11-01")


def test_a_source_has_one_name_from_every_folder(days, monkeypatch):
    monkeypatch.chdir(days.parent)

    assert ClickSource(data=days.name).name == ClickSource(data=str(days)).name == str(days)
    assert ClickSource(data=str(days), schema_file="schema.json").name != str(days)
