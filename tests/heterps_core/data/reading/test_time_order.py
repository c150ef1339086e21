"""Rows out of the order of the schema's time_column are refused with file, row and what to do."""

from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.reading import time_order
from heterps_core.data.reading.time_order import check_time_order
from heterps_core.data.row_query import RowQuery
from heterps_core.data.schema import DataSchema
from heterps_core.errors import ConfigurationError, DataError

SCHEMA = DataSchema(name="clicks", label_column="label", time_column="at", categorical_columns=("site",))
START = datetime(2026, 11, 1)


def write_text(path, times):
    path.write_text(
        "label,at,site\n" + "".join(f"{row % 2},{time},s{row % 3}\n" for row, time in enumerate(times))
    )
    return path


def write_parquet(path, times, *, row_group_size=4):
    table = pa.table({"label": pa.array([row % 2 for row in range(len(times))]), "at": times})
    table = table.append_column("site", pa.array([f"s{row % 3}" for row in range(len(times))]))
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


@pytest.mark.parametrize(
    "times",
    [
        ["9", "10", "10", "200"],
        ["2026-11-01 09:00:00", "2026-11-01 10:00:00", "2026-11-02"],
        ["2026-11-01T09:00:00Z", "2026-11-01T10:00:00Z"],
    ],
)
def test_numbers_and_times_in_text_are_compared_by_value(tmp_path, times):
    check_time_order([write_text(tmp_path / "clicks.csv", times)], SCHEMA)

    with pytest.raises(DataError, match=f"row {len(times) + 1} has .* after"):
        check_time_order([write_text(tmp_path / "clicks.csv", [*times, times[0]])], SCHEMA)


def test_the_first_row_out_of_order_is_named_as_a_search_row_by_row_finds_it(tmp_path):
    random = np.random.default_rng(0)
    for _ in range(20):
        seconds = np.sort(random.integers(0, 50, size=30))
        seconds[random.integers(1, 30)] -= random.integers(0, 3)
        times = pa.array([START + timedelta(seconds=int(each)) for each in seconds])
        first = next((row + 1 for row in range(1, 30) if seconds[row] < seconds[row - 1]), None)
        file = write_parquet(tmp_path / "clicks.parquet", times)

        if first is None:
            check_time_order([file], SCHEMA)
        else:
            with pytest.raises(DataError, match=rf"clicks\.parquet: .*but row {first} has"):
                check_time_order([file], SCHEMA)


def test_a_file_must_go_on_where_the_one_before_ended(tmp_path):
    early = write_text(tmp_path / "early.csv", [1, 2])
    late = write_text(tmp_path / "late.csv", [2, 3])

    check_time_order([early, late], SCHEMA)
    with pytest.raises(DataError, match=r"early\.csv: .*row 1 has 1 after 3"):
        check_time_order([late, early], SCHEMA)


@pytest.mark.parametrize(
    ("times", "problem"),
    [
        (["1", "", "3"], "row 2 must have a value in the time_column at"),
        (["noon"], "must hold numbers, or times such as 2026-11-01 12:00:00, got 'noon'"),
    ],
)
def test_what_is_no_time_is_refused(tmp_path, times, problem):
    with pytest.raises(DataError, match=problem):
        check_time_order([write_text(tmp_path / "clicks.csv", times)], SCHEMA)


def test_a_file_without_the_column_is_refused(tmp_path):
    pq.write_table(pa.table({"label": [1], "site": ["s"]}), tmp_path / "clicks.parquet")

    with pytest.raises(DataError, match="must have the columns at; has label, site"):
        check_time_order([tmp_path / "clicks.parquet"], SCHEMA)


def test_a_time_column_must_be_one_of_those_that_a_schema_names():
    with pytest.raises(
        ConfigurationError, match="column_names must hold every column in use, but lacks 'at'"
    ):
        DataSchema(
            name="c", label_column="y", time_column="at", categorical_columns=("a",), column_names=("y", "a")
        )


def test_shuffled_rows_are_refused_and_sorted_by_the_query_that_the_refusal_names(tmp_path):
    times = pa.array(
        [START + timedelta(seconds=int(each)) for each in np.random.default_rng(1).permutation(40)]
    )
    file = write_parquet(tmp_path / "clicks.parquet", times)

    with pytest.raises(DataError, match='ORDER BY "at"') as refusal:
        prepare_dataset(file, schema=SCHEMA, out_dir=tmp_path / "rows")

    query = RowQuery(tmp_path / "sorted.sql", str(refusal.value).rpartition(": ")[2])
    sorted_file = query.result([file], day=None, schema=SCHEMA, folder=tmp_path / "queried")
    assert prepare_dataset(sorted_file, schema=SCHEMA, out_dir=tmp_path / "rows").manifest.num_rows == 40
    assert pq.read_table(sorted_file)["at"].to_pylist() == sorted(times.to_pylist())


def test_the_query_sorts_numbers_of_a_text_by_value(tmp_path):
    file = write_text(tmp_path / "clicks.csv", [10, 9, 200])

    with pytest.raises(DataError, match=r"row 2 has 9 after 10") as refusal:
        check_time_order([file], SCHEMA)

    query = RowQuery(tmp_path / "sorted.sql", str(refusal.value).rpartition(": ")[2])
    sorted_file = query.result([file], day=None, schema=SCHEMA, folder=tmp_path / "queried")
    assert pq.read_table(sorted_file)["at"].to_pylist() == ["9", "10", "200"]
    check_time_order([sorted_file], SCHEMA)


SECONDS = [1_700_000_000, 1_700_000_020, 1_700_000_020, 1_700_000_400]
WAYS_TO_WRITE = {
    "seconds": pa.array(SECONDS),
    "seconds as float64": pa.array(SECONDS, pa.float64()),
    "seconds as uint64": pa.array(SECONDS, pa.uint64()),
    "milliseconds": pa.array([each * 1_000 for each in SECONDS]),
    "nanoseconds": pa.array([each * 10**9 + 1 for each in SECONDS]),
    "timestamp": pa.array(SECONDS, pa.timestamp("s")),
    "timestamp in a zone": pa.array(SECONDS, pa.timestamp("s", "UTC")),
    "texts of seconds": pa.array(list(map(str, SECONDS))),
    "ISO texts": pa.array([f"{START + timedelta(seconds=each)}" for each in SECONDS]),
    "ISO texts in a view": pa.array(
        [f"{START + timedelta(seconds=each):%Y-%m-%dT%H:%M:%S}Z" for each in SECONDS], pa.string_view()
    ),
    "dictionary": pa.array([f"{START + timedelta(seconds=each)}" for each in SECONDS]).dictionary_encode(),
    "days": pa.array([20231101, 20231130, 20231130, 20231201]),
}


@pytest.mark.parametrize("way", WAYS_TO_WRITE)
@pytest.mark.parametrize("write", [write_parquet, write_text])
def test_times_are_compared_however_they_are_written(tmp_path, way, write):
    times, file = WAYS_TO_WRITE[way], tmp_path / "clicks"
    as_rows = times if write is write_parquet else times.to_pylist()

    check_time_order([write(file, as_rows)], SCHEMA)
    swapped = pa.concat_arrays([times[0:1], times[2:4], times[1:2]])
    with pytest.raises(DataError, match="but row 4 has"):
        check_time_order([write(file, swapped if write is write_parquet else swapped.to_pylist())], SCHEMA)


def test_files_of_other_units_are_compared_by_value(tmp_path):
    parts = [
        write_parquet(tmp_path / f"{number}.parquet", times)
        for number, times in enumerate(
            [
                pa.array([1, 2], pa.timestamp("s")),
                pa.array([2_000, 2_001], pa.timestamp("ms")),
                pa.array([2_002_000], pa.timestamp("us", "UTC")),
            ]
        )
    ]

    check_time_order(parts, SCHEMA)
    with pytest.raises(DataError, match=r"1\.parquet: .*row 1 has 1970-01-01 00:00:02"):
        check_time_order([parts[2], parts[1]], SCHEMA)
    numbers = write_parquet(tmp_path / "numbers.parquet", pa.array([3, 4]))
    with pytest.raises(DataError, match=r"holds int64, timestamp\[us, tz=UTC\] before; write both alike"):
        check_time_order([parts[2], numbers], SCHEMA)
    fractions = write_parquet(tmp_path / "fractions.parquet", pa.array([4.0, 4.5]))
    check_time_order([numbers, fractions], SCHEMA)
    with pytest.raises(DataError, match="row 1 has 3"):
        check_time_order([fractions, numbers], SCHEMA)


def test_the_place_in_a_part_of_one_row_is_that_of_the_file(tmp_path):
    times = pa.array([5, 6, 7, 4])

    with pytest.raises(DataError, match="row 4 has 4 after 7"):
        check_time_order([write_parquet(tmp_path / "x.parquet", times, row_group_size=1)], SCHEMA)


def test_a_row_far_below_is_named_and_each_row_is_looked_at_once(tmp_path, monkeypatch):
    num_rows, looked_at = 140_000, []
    seconds = np.arange(num_rows)
    seconds[-1] = 5
    file = write_parquet(tmp_path / "x.parquet", pa.array(seconds), row_group_size=num_rows)
    look = time_order.is_earlier
    monkeypatch.setattr(time_order, "is_earlier", lambda times: looked_at.append(len(times)) or look(times))

    with pytest.raises(DataError, match="row 140,000 has 5 after 139998"):
        check_time_order([file], SCHEMA)

    # Of each part but the first also the last row of the part before.
    assert len(looked_at) > 2
    assert sum(looked_at) == num_rows + len(looked_at) - 1
