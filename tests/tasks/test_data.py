import gzip
import shutil
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from heterps_core.data.synthetic.click_stream import write_click_days, write_click_stream
from heterps_core.errors import ConfigurationError, DataError
from infra.workspace import Workspace
from tasks.data import (
    KEPT_NIGHTS,
    check_source,
    find_night_of,
    prepare_data,
    source_name,
)


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return write_click_stream(tmp_path_factory.mktemp("stream") / "clicks.tsv", num_rows=3_000, seed=1)


def test_a_source_is_prepared_in_the_workspace_and_reused(stream, tmp_path):
    workspace = Workspace(root=tmp_path).create()

    first = prepare_data.fn(workspace, data=str(stream.path), schema_file=None)
    written = (tmp_path / "data").stat().st_mtime_ns
    second = prepare_data.fn(workspace, data=str(stream.path), schema_file=None)

    assert first == second
    assert first.open().manifest.num_rows == 3_000
    assert (tmp_path / "data").stat().st_mtime_ns == written


def test_a_missing_source_is_told_without_reading(tmp_path):
    with pytest.raises(DataError, match=r"none\.tsv"):
        check_source(str(tmp_path / "none.tsv"), schema_file=None)


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    folder = tmp_path_factory.mktemp("days")
    write_click_days(folder, first_day=date(2026, 11, 1), num_days=3, rows_per_day=700, seed=1)
    return folder


def prepare_night(workspace, folder, day, **changes):
    return prepare_data.fn(
        workspace, data=str(folder), schema_file=None, night=find_night_of(str(folder), day), **changes
    )


def test_a_night_is_trained_on_its_day_and_judged_on_the_next(days, tmp_path):
    clicks = prepare_night(Workspace(root=tmp_path).create(), days, "2026-11-01")
    dataset = clicks.open()

    sources = [Path(source.path).parent.name for source in dataset.manifest.sources]
    assert sources == ["day=2026-11-01", "day=2026-11-02"]
    assert (dataset.num_train_rows, dataset.num_eval_rows) == (700, 700)
    probabilities = np.load(days / "day=2026-11-02" / "_clicks.tsv.gz.probabilities.npy")
    assert clicks.best_reachable.auc == pytest.approx(roc_auc_score(dataset.eval_labels, probabilities))


def test_the_latest_night_is_the_one_before_the_last_day(days):
    assert find_night_of(str(days), None).day == date(2026, 11, 2)


def test_rows_of_a_night_are_prepared_as_the_model_that_goes_on_with_them_asks(days, tmp_path):
    workspace = Workspace(root=tmp_path).create()
    first = prepare_night(workspace, days, "2026-11-01").open().manifest

    second = prepare_night(
        workspace, days, "2026-11-02", buckets_per_slot=77, numeric_transform=first.numeric_transform
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
            r"day 2026-11-02, .*clicks\.tsv\.gz: the gzip stream is truncated",
        ),
    ],
    ids=["columns", "empty", "damaged"],
)
def test_a_bad_partition_is_told_with_its_day_file_and_line(days, tmp_path, day, content, problem):
    copied = tmp_path / "days"
    shutil.copytree(days, copied)
    bad = copied / f"day={day}" / "clicks.tsv.gz"
    bad.write_bytes(gzip.compress(content) if content.endswith(b"\n") else content)

    with pytest.raises(DataError, match=problem) as caught:
        prepare_night(Workspace(root=tmp_path / "home").create(), copied, "2026-11-01")

    assert str(caught.value).endswith(
        "nothing was launched, and the champion stays: fix that day, or choose another"
    )


def test_a_bad_row_in_the_middle_of_a_day_is_told_with_its_line(days, tmp_path):
    copied = tmp_path / "days"
    shutil.copytree(days, copied)
    bad = copied / "day=2026-11-02" / "clicks.tsv.gz"
    lines = gzip.decompress(bad.read_bytes()).splitlines()
    lines[411] = lines[411].replace(b"\t", b"\tmany", 1)
    bad.write_bytes(gzip.compress(b"\n".join(lines)))

    with pytest.raises(DataError, match=r"day 2026-11-02, .*, line 412: "):
        prepare_night(Workspace(root=tmp_path / "home").create(), copied, "2026-11-01")


def test_a_first_night_has_tables_for_the_rows_of_its_day(tmp_path):
    write_click_days(tmp_path, first_day=date(2026, 11, 6), num_days=2, rows_per_day=33_000, seed=0)

    clicks = prepare_night(Workspace(root=tmp_path / "home").create(), tmp_path, "2026-11-06")

    assert set(clicks.open().features.slot_rows) == {2_048}  # 33,000 / 16 = 2,062


@pytest.mark.parametrize(("buckets_per_slot", "is_told"), [(256, True), (512, False)])
def test_data_that_has_outgrown_the_tables_of_the_champion_is_told(
    days, tmp_path, caplog, buckets_per_slot, is_told
):
    caplog.set_level("INFO")

    prepare_night(Workspace(root=tmp_path).create(), days, "2026-11-01", buckets_per_slot=buckets_per_slot)

    advice = (
        "each keeps the champion's 256 rows, but 700 rows of data would get 1,024 in a new model, with fewer "
        "collisions; start_from=scratch trains one"
    )
    assert (advice in caplog.text) == is_told


def test_prepared_nights_do_not_fill_the_disk(days, tmp_path):
    workspace = Workspace(root=tmp_path).create()
    for buckets in range(60, 70):
        clicks = prepare_night(workspace, days, "2026-11-01", buckets_per_slot=buckets)

    assert len(list(workspace.data_directory.glob("*2026-11-01*"))) == KEPT_NIGHTS
    assert set(clicks.open().features.slot_rows) == {69}


def test_days_of_a_source_share_a_profile_within_a_week(tmp_path):
    # The 8th of November 2026 is a Sunday.
    write_click_days(tmp_path, first_day=date(2026, 11, 6), num_days=4, rows_per_day=20, seed=0)
    workspace = Workspace(root=tmp_path / "home").create()

    friday, saturday, sunday = (
        prepare_night(workspace, tmp_path, f"2026-11-0{number}").profiled_as for number in (6, 7, 8)
    )
    week = prepare_night(workspace, tmp_path, "2026-11-08", buckets_per_slot=2_048).profiled_as

    assert friday == saturday == sunday == week
    assert friday.endswith("in 2026-W45")


def test_a_day_can_be_chosen_only_of_data_that_has_days(stream):
    for data in (None, str(stream.path)):
        with pytest.raises(ConfigurationError, match="day 2026-11-01 can be chosen only"):
            check_source(data, schema_file=None, day="2026-11-01")


def test_a_source_has_one_name_from_every_folder(days, monkeypatch):
    monkeypatch.chdir(days.parent)

    assert source_name(days.name, None) == source_name(str(days), None) == str(days)
    assert source_name(str(days), "schema.json") != str(days)
