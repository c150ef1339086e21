from datetime import date

import pytest

from heterps_core.data.reading.days import find_night, parse_day, partitions_of
from heterps_core.data.reading.readers import list_source_files
from heterps_core.data.reading.source_files import files_of_day
from heterps_core.errors import ConfigurationError, DataError


def make_days(folder, *days, files=("clicks.tsv",)):
    for day in days:
        partition = folder / f"day={day}"
        partition.mkdir(parents=True)
        for name in files:
            (partition / name).write_text("row\n")
    return folder


def files_by_day(source):
    return {day: files_of_day(entries) for day, entries in partitions_of(source).items()}


def test_days_are_found_in_order_with_their_files(tmp_path):
    make_days(tmp_path, "2026-11-10", "2026-11-09", files=("b.tsv", "a.tsv", "_marks", ".hidden"))
    (tmp_path / "README").write_text("no rows\n")

    found = files_by_day(tmp_path)

    assert list(found) == [date(2026, 11, 9), date(2026, 11, 10)]
    assert [path.name for path in found[date(2026, 11, 9)]] == ["a.tsv", "b.tsv"]


@pytest.mark.parametrize("pattern", ["day=*", "day=2026-11-*/*.tsv", "day=*/*"])
def test_a_pattern_finds_the_days_that_it_fits(tmp_path, pattern):
    make_days(tmp_path, "2026-11-09", "2026-11-10", files=("a.tsv", "_a.tsv.probabilities.npy"))

    found = files_by_day(tmp_path / pattern)

    assert {day: [path.name for path in files] for day, files in found.items()} == {
        date(2026, 11, 9): ["a.tsv"],
        date(2026, 11, 10): ["a.tsv"],
    }


@pytest.mark.parametrize("name", ["", "day=*", "day=*/*", "day=*/hour=*/*.tsv"])
def test_folders_of_hours_within_a_day_belong_to_it_in_their_order(tmp_path, name):
    days = ("2026-11-09", "2026-11-10")
    make_days(tmp_path, *(f"{day}/hour={hour}" for day in days for hour in (10, 9)))

    found = files_by_day(tmp_path / name)

    assert list(found) == [date(2026, 11, 9), date(2026, 11, 10)]
    assert [path.parent.name for path in found[date(2026, 11, 9)]] == ["hour=9", "hour=10"]


def test_files_of_a_day_and_of_its_hours_are_all_trained_on(tmp_path):
    make_days(tmp_path, "2026-11-09", "2026-11-09/hour=01", "2026-11-10")

    night = find_night(tmp_path, None)

    assert [str(path.relative_to(tmp_path)) for path in night.train_files] == [
        "day=2026-11-09/clicks.tsv",
        "day=2026-11-09/hour=01/clicks.tsv",
    ]


def test_another_folder_within_a_day_is_refused_by_name(tmp_path):
    make_days(tmp_path, "2026-11-09/old", "2026-11-10")

    with pytest.raises(DataError, match=r"day=2026-11-09: .* holds the folder 'old'"):
        find_night(tmp_path, None)


def test_what_lies_beside_the_days_is_left_out_and_reported(tmp_path, caplog):
    make_days(tmp_path, "2026-11-09", "2026-11-10")
    (tmp_path / "late.tsv").write_text("row\n")
    (tmp_path / "_SUCCESS").touch()

    assert len(partitions_of(tmp_path)) == 2
    assert "is left out: late.tsv" in caplog.text


ONE_DAY = "days/day=2026-11-09"


@pytest.mark.parametrize(
    "name", ["clicks.tsv", "", "*.tsv", ONE_DAY, f"{ONE_DAY}/clicks.tsv", f"{ONE_DAY}/*.tsv"]
)
def test_what_has_no_days_or_is_one_of_them_is_not_cut_into_days(tmp_path, name):
    (tmp_path / "clicks.tsv").write_text("row\n")
    make_days(tmp_path / "days", "2026-11-09", "2026-11-10")
    source = tmp_path / name

    assert partitions_of(source) == {}
    assert find_night(source, None) is None


def test_a_folder_that_is_no_date_is_left_out_and_reported(tmp_path, caplog):
    make_days(tmp_path, "2026-11-09", "2026-02-30")

    assert list(partitions_of(tmp_path)) == [date(2026, 11, 9)]
    assert "2026-02-30" in caplog.text


def test_the_night_is_the_latest_day_whose_next_day_is_there_too(tmp_path):
    make_days(tmp_path, "2026-11-07", "2026-11-08", "2026-11-09", "2026-11-11")

    night = find_night(tmp_path, None)

    assert night.day == date(2026, 11, 8)
    assert [path.parent.name for path in night.train_files] == ["day=2026-11-08"]
    assert [path.parent.name for path in night.eval_files] == ["day=2026-11-09"]
    assert night.day_of(str(night.eval_files[0])) == date(2026, 11, 9)
    assert night.day_of(str(tmp_path)) is None


def test_the_next_day_of_the_last_of_a_month_is_the_first(tmp_path):
    make_days(tmp_path, "2028-02-29", "2028-03-01")

    assert find_night(tmp_path, date(2028, 2, 29)).eval_files[0].parent.name == "day=2028-03-01"


@pytest.mark.parametrize(
    ("day", "missing"),
    [
        ("2026-11-05", "the day 2026-11-05, which the night trains on"),
        ("2026-11-08", "the day 2026-11-09, which"),
    ],
)
def test_a_missing_day_is_named_with_those_that_are_there(tmp_path, day, missing):
    make_days(tmp_path, "2026-11-07", "2026-11-08")

    with pytest.raises(DataError, match=missing) as caught:
        find_night(tmp_path, date.fromisoformat(day))

    assert "there are 2 days from 2026-11-07 to 2026-11-08; nothing was launched" in str(caught.value)


def test_an_empty_partition_is_named(tmp_path):
    make_days(tmp_path, "2026-11-07")
    make_days(tmp_path, "2026-11-08", files=("_SUCCESS",))

    with pytest.raises(
        DataError, match="the folder day=2026-11-08, which 2026-11-07 is judged on, must hold"
    ):
        find_night(tmp_path, None)


def test_no_two_days_in_a_row_are_no_night(tmp_path):
    make_days(tmp_path, "2026-11-07", "2026-11-09")

    with pytest.raises(DataError, match="no two of them in a row; wait for the next day"):
        find_night(tmp_path, None)


def test_a_day_of_data_without_days_is_refused(tmp_path):
    (tmp_path / "clicks.tsv").write_text("row\n")

    with pytest.raises(
        ConfigurationError, match="only where the data is cut into folders such as day=2026-11-09"
    ):
        find_night(tmp_path, date(2026, 11, 9))


@pytest.mark.parametrize("text", ["20261109", "2026-11-9", "2026-13-01", "2026-W45-1", "yesterday", ""])
def test_a_day_has_one_form(text):
    with pytest.raises(ConfigurationError, match="a day must be a date such as 2026-11-21"):
        parse_day(text)


def test_a_day_that_is_missing_is_named_as_the_others_are(tmp_path):
    for day in ("2026-11-01", "2026-11-02"):
        (tmp_path / f"dt={day}" / "hour=00").mkdir(parents=True)
        (tmp_path / f"dt={day}" / "hour=00" / "clicks.tsv").write_text("row\n")

    assert find_night(tmp_path, None).day == date(2026, 11, 1)
    with pytest.raises(DataError, match=r"must have the day 2026-11-03, which 2026-11-02 is judged on"):
        find_night(tmp_path, date(2026, 11, 2))


@pytest.mark.parametrize(
    "folder",
    [
        "year={0:%Y}/month={0:%m}/day={0:%d}",
        "Year={0:%Y}/Month={0.month}/Day={0.day}/hour=03",
        "ds={0:%Y%m%d}",
        "dt={0:%Y-%m-%d}-03",
        "dt={0:%Y%m%d}03",
        "event_date={0:%Y-%m-%d}",
        "ts={0:%Y-%m-%d} 03%3A00%3A00",
        "region=eu/day={0:%Y-%m-%d}",
        "region=eu/year={0:%Y}/month={0:%m}/day={0:%d}",
        "{0:%Y/%m/%d}",
        "{0:%Y/%m/%d}/03",
        "region=eu/{0:%Y/%m/%d}",
    ],
)
@pytest.mark.parametrize("pattern", ["", "*"])
def test_days_are_found_in_every_form_that_writers_give_their_folders(tmp_path, folder, pattern):
    days = [date(2026, 10, 31), date(2026, 11, 1), date(2026, 11, 2)]
    for day in days:
        (tmp_path / folder.format(day)).mkdir(parents=True)
        (tmp_path / folder.format(day) / "a.tsv").write_text("row\n")

    night = find_night(tmp_path / pattern, date(2026, 11, 1))

    assert list(partitions_of(tmp_path / pattern)) == days
    assert night.train_files == (tmp_path / folder.format(days[1]) / "a.tsv",)
    assert night.eval_files == (tmp_path / folder.format(days[2]) / "a.tsv",)


def test_a_day_has_the_files_of_all_regions_and_hours(tmp_path):
    for name in ("region=us/dt=2026-11-01-10", "region=us/dt=2026-11-01-09", "region=eu/dt=2026-11-01-00"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.tsv").write_text("row\n")

    [files] = files_by_day(tmp_path).values()

    assert [str(file.parent.relative_to(tmp_path)) for file in files] == [
        "region=eu/dt=2026-11-01-00",
        "region=us/dt=2026-11-01-09",
        "region=us/dt=2026-11-01-10",
    ]


@pytest.mark.parametrize("month", ["year=2026/month=11/day={}", "2026/11/{}"])
def test_days_of_a_month_are_those_of_the_folders_above(tmp_path, month):
    for day in ("01", "02"):
        (tmp_path / month.format(day) / "03").mkdir(parents=True)

    found = partitions_of((tmp_path / month.format("01")).parent)
    assert list(found) == [date(2026, 11, 1), date(2026, 11, 2)]
    assert partitions_of(tmp_path / month.format("01")) == {}


def test_hours_of_a_date_without_keys_are_read_in_order_also_without_the_days(tmp_path):
    names = ["2025/12/31/23", "2026/01/01/00", "2026/01/01/01", "2026/01/10/00"]
    for name in reversed(names):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.tsv").write_text("row\n")

    day = files_by_day(tmp_path)[date(2026, 1, 1)]
    assert [str(file.parent.relative_to(tmp_path)) for file in day] == names[1:3]
    assert [str(file.parent.relative_to(tmp_path)) for file in list_source_files(tmp_path)] == names


@pytest.mark.parametrize("name", ["2026/13/01", "2026/11/32", "0026/11/01", "20260/11/01", "users/11/01"])
def test_folders_of_numbers_that_are_no_date_are_refused_as_before(tmp_path, name):
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "a.tsv").write_text("row\n")

    assert partitions_of(tmp_path) == {}
    with pytest.raises(
        DataError, match=r"or folders named key=value .* such as day=2026-11-01 or 2026/11/01"
    ):
        list_source_files(tmp_path)


def test_a_date_above_the_source_is_no_day_of_it(tmp_path):
    make_days(tmp_path / "date=2026-12-01", "2026-11-09", "2026-11-10")

    assert list(partitions_of(tmp_path / "date=2026-12-01")) == [date(2026, 11, 9), date(2026, 11, 10)]


def test_folders_that_name_two_days_are_refused(tmp_path):
    make_days(tmp_path / "load_date=2026-11-05", "2026-11-04")
    make_days(tmp_path / "load_date=2026-11-06", "2026-11-06")

    with pytest.raises(
        DataError, match="must be of one day, but names load_date=2026-11-05 and day=2026-11-04"
    ):
        find_night(tmp_path, None)


def test_a_day_without_its_month_is_refused(tmp_path):
    make_days(tmp_path, "01", "02")

    with pytest.raises(DataError, match="must name the days of its folders as day=2026-11-21, got day=01"):
        find_night(tmp_path, None)


def test_a_day_with_keys_and_without_is_refused(tmp_path):
    for folder in ("year=2026/month=11/day=29", "2026/11/29"):
        (tmp_path / folder).mkdir(parents=True)

    with pytest.raises(DataError, match="must name a day in one way, but 2026-11-29 is 29 and day=29"):
        partitions_of(tmp_path)


@pytest.mark.parametrize("other", ["ds=20261109", "day=20261109", "dt=2026-11-09"])
def test_a_day_that_is_there_in_two_spellings_is_refused(tmp_path, other):
    make_days(tmp_path, "2026-11-09", "2026-11-10")
    (tmp_path / other).mkdir()

    with pytest.raises(DataError, match=rf"must name a day in one way, but 2026-11-09 is .*{other}"):
        partitions_of(tmp_path)
