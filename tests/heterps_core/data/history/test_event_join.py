"""Histories by pointer are those that a search of every event finds, and no row sees an event of its own time."""

import datetime
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pytest

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.history.event_join import newest_events
from heterps_core.data.manifest import folder_of
from heterps_core.data.preparation import prepare_dataset
from heterps_core.errors import ConfigurationError, DataError
from tests.heterps_core.data.history.event_rows import (
    MOST,
    draw_events,
    draw_rows,
    fat,
    histories,
    joined,
    schema_of,
    write,
)

ROWS, EVENTS = draw_rows(900, seed=1), draw_events(3_000, seed=1)


def prepared(folder, rows=ROWS, events=EVENTS, **changes):
    schema = schema_of(write(events, folder / "events" / "1.parquet").parent, **changes)
    source = (
        rows if not isinstance(rows, pa.Table) else write(rows, folder / "rows.parquet", row_group_size=200)
    )
    return prepare_dataset(source, schema=schema, buckets_per_slot=61, out_dir=folder / "out" / "prepared")


def timed(table, unit, zone=None, *, per_s=1_000):
    """The table with its seconds as times, of rows 1 / per_s later."""
    times = (
        pc.add(pc.multiply(table["seen_at"], per_s), 0)
        .cast(pa.timestamp("ms"))
        .cast(pa.timestamp(unit, zone))
    )
    return table.set_column(table.column_names.index("seen_at"), "seen_at", times)


def test_no_row_of_shuffled_times_sees_an_event_of_its_time_or_later(tmp_path):
    found, expected = joined(prepared(tmp_path)), histories(ROWS, EVENTS)

    assert found == expected
    assert {len(each) for each in expected} == set(range(MOST + 1))


def test_candidates_of_one_user_and_time_have_the_same_history(tmp_path):
    candidates = ROWS.take(np.repeat(np.arange(len(ROWS)), 3))

    assert joined(prepared(tmp_path, candidates)) == histories(candidates, EVENTS)


def test_rows_with_histories_in_lists_are_the_same_to_a_model(tmp_path):
    by_pointer = prepared(tmp_path)
    rows, schema = fat(ROWS, EVENTS)
    in_lists = prepare_dataset(
        write(rows, tmp_path / "fat.parquet"),
        schema=schema,
        buckets_per_slot=61,
        out_dir=tmp_path / "fat" / "rows",
    )

    assert by_pointer.features == in_lists.features
    every = np.arange(len(ROWS))
    assert (by_pointer.batch(every).ids == in_lists.batch(every).ids).all()
    assert [each.mean_length for each in by_pointer.manifest.columns] == [
        each.mean_length for each in in_lists.manifest.columns
    ]


@pytest.mark.parametrize(
    ("row_unit", "event_unit", "zone"), [("ms", "us", None), ("us", "ms", "UTC"), ("ns", "s", "Europe/Paris")]
)
def test_times_of_other_units_are_compared_exactly(tmp_path, row_unit, event_unit, zone):
    found = joined(prepared(tmp_path, timed(ROWS, row_unit, zone), timed(EVENTS, event_unit, zone)))

    assert found == histories(ROWS, EVENTS)


def test_a_row_one_microsecond_after_an_event_of_whole_seconds_sees_it(tmp_path):
    rows = timed(ROWS, "us")
    later = pc.add(rows["seen_at"], pa.scalar(datetime.timedelta(microseconds=1), pa.duration("us")))

    found = joined(prepared(tmp_path, rows.set_column(3, "seen_at", later), timed(EVENTS, "s")))

    assert found == histories(ROWS.set_column(3, "seen_at", pc.add(ROWS["seen_at"], 0.5)), EVENTS)


def test_times_of_an_hour_that_a_zone_has_twice_are_compared_exactly(tmp_path):
    clocks_go_back = pa.scalar(datetime.timedelta(seconds=1_793_509_200 - 150), pa.duration("us"))

    def moved(table):
        times = pc.add(timed(table, "us", "UTC")["seen_at"], clocks_go_back)
        return with_type(
            table.set_column(table.column_names.index("seen_at"), "seen_at", times),
            "seen_at",
            pa.timestamp("us", "America/New_York"),
        )

    assert joined(prepared(tmp_path, moved(ROWS), moved(EVENTS))) == histories(ROWS, EVENTS)


@pytest.mark.parametrize(("rows", "events"), [("double", "int64"), ("int32", "float"), ("date32", "date32")])
def test_numbers_and_dates_are_compared_as_such(tmp_path, rows, events):
    def cast(table, kind):
        days = table["seen_at"].cast(pa.int32())
        return table.set_column(table.column_names.index("seen_at"), "seen_at", days.cast(kind))

    assert joined(prepared(tmp_path, cast(ROWS, rows), cast(EVENTS, events))) == histories(ROWS, EVENTS)


def test_rows_of_text_point_to_events_by_texts_of_key_and_time(tmp_path):
    path = tmp_path / "rows.csv"
    pa_csv.write_csv(timed(ROWS, "s"), path)

    assert joined(prepared(tmp_path, path, timed(EVENTS, "us"))) == histories(ROWS, EVENTS)


def test_keys_may_be_texts_that_no_list_of_the_schema_names(tmp_path):
    rows, events = (
        table.append_column("who", pc.binary_join_element_wise("u", table["user"].cast(pa.string()), ""))
        for table in (ROWS, EVENTS)
    )

    assert joined(prepared(tmp_path, rows, events, key="who")) == histories(ROWS, EVENTS)


def test_a_sequence_may_have_any_name(tmp_path):
    named = schema_of(write(EVENTS, tmp_path / "events.parquet"), columns={"key": "item", "time": "action"})

    items, actions = newest_events(named, tmp_path).lists(pa.array(["3"]), None, path="rows")

    expected = histories(pa.table({"user": [3], "seen_at": [10**9]}), EVENTS)
    assert [*zip(*items.to_pylist(), *actions.to_pylist(), strict=True)] == expected[0]


def test_the_newest_state_is_that_of_all_events_and_a_lookup_may_have_a_time(tmp_path):
    schema = schema_of(write(EVENTS, tmp_path / "events.parquet"))
    events = newest_events(schema, tmp_path)
    keys = pa.array(["3", "no such user", None])

    items, _ = events.lists(keys, None, path="rows")
    before, _ = events.lists(keys, pa.array([100, 100, 100]), path="rows")

    def expected(time):
        rows = pa.table({"user": [3], "seen_at": [time]})
        return [[item for item, _ in histories(rows, EVENTS)[0]], [], []]

    assert items.to_pylist() == expected(10**9)
    assert before.to_pylist() == expected(100)


def test_histories_of_millions_of_events_are_joined_by_parts(tmp_path):
    times = np.arange(1_000)
    of_one_user = pa.table(
        {
            "user": [1] * 1_000,
            "seen_at": times,
            "item": times % 7,
            "action": pa.array(times).cast(pa.string()),
        }
    )
    schema = schema_of(write(of_one_user, tmp_path / "events.parquet"), max_length=1_000)
    # The user has no event before time 0, and all of them before time 1,000.
    row_times = np.arange(6_000) % 1_001

    items, actions = newest_events(schema, tmp_path).lists(
        pa.array([1] * 6_000), pa.array(row_times), path="rows"
    )

    assert actions.value_lengths().to_numpy().tolist() == row_times.tolist()
    numbers = np.concatenate([np.arange(length) for length in row_times])
    assert (actions.values.cast(pa.string()).cast(pa.int64()).to_numpy() == numbers).all()
    assert (items.values.cast(pa.string()).cast(pa.int64()).to_numpy() == numbers % 7).all()


def test_a_node_elsewhere_copies_the_events_and_leaves_no_file(tmp_path, monkeypatch):
    directory = prepared(tmp_path).directory
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()

    elsewhere = PreparedDataset.open("s3://bucket/run/data", folder=folder_of(directory))

    assert joined(elsewhere) == histories(ROWS, EVENTS)
    assert not [*(tmp_path / "temporary").iterdir()]


def without(table, name):
    return table.drop_columns([name])


def with_type(table, name, kind):
    return table.set_column(table.column_names.index(name), name, table[name].cast(kind))


@pytest.mark.parametrize(
    ("rows", "events", "changes", "message"),
    [
        (ROWS, EVENTS, {"table": "nowhere"}, "there is no such file or folder"),
        (ROWS, EVENTS[:0], {}, "must hold at least one event of the history, got none"),
        (
            ROWS,
            EVENTS.set_column(2, "item", pa.nulls(3_000)),
            {},
            "must hold an event with key, time and all",
        ),
        (
            ROWS,
            EVENTS.set_column(2, "item", pa.array([[1]] * 3_000)),
            {},
            "item must hold texts or numbers, one in",
        ),
        (
            ROWS,
            EVENTS.set_column(0, "user", pa.array([[1]] * 3_000)),
            {},
            "user must hold texts or numbers, one in",
        ),
        (ROWS, EVENTS.set_column(2, "item", pa.array([b"\xff"] * 3_000)), {}, "Invalid UTF8"),
        (ROWS, without(EVENTS, "user"), {}, "must have the columns user"),
        (ROWS, without(EVENTS, "seen_at"), {}, "must have the columns seen_at"),
        (ROWS, without(EVENTS, "action"), {}, "must have the columns action"),
        (
            ROWS,
            with_type(EVENTS, "seen_at", pa.string()),
            {},
            "seen_at must hold numbers, dates or timestamps, .* got string",
        ),
        (timed(ROWS, "us"), EVENTS, {}, "column seen_at must hold numbers, .* got times without a time zone"),
        (ROWS, timed(EVENTS, "us", "UTC"), {}, "must hold times with a time zone, .* got numbers"),
        (
            timed(ROWS, "us"),
            timed(EVENTS, "us", "UTC"),
            {},
            "must hold times with a time zone, .* got times without",
        ),
        (
            timed(ROWS, "us"),
            with_type(with_type(EVENTS, "seen_at", pa.int32()), "seen_at", pa.date32()),
            {},
            "dates",
        ),
        (without(ROWS, "seen_at"), EVENTS, {}, "must have the columns seen_at"),
        (with_type(ROWS, "user", pa.string()), EVENTS, {}, "column user must hold numbers, .* got texts"),
        (ROWS.append_column("past_items", ROWS["item"]), EVENTS, {}, "must not have the column past_items"),
        (
            ROWS.set_column(3, "seen_at", pa.array([None, *range(899)])),
            EVENTS,
            {},
            "is empty in 1 rows of 200",
        ),
    ],
)
def test_what_cannot_be_joined_is_refused_in_one_line_before_training(
    tmp_path, rows, events, changes, message
):
    with pytest.raises(DataError, match=message) as caught:
        prepared(tmp_path, rows, events, **changes)

    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / "prepared").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns": {}}, "must name at least one sequence"),
        ({"columns": {"item": "item"}}, "a name that no column of the rows has, got 'item'"),
        ({"columns": {"seen_at": "item"}}, "a name that no column of the rows has, got 'seen_at'"),
    ],
)
def test_a_history_that_makes_no_column_of_its_own_is_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        schema_of("events", **changes)


def test_a_table_that_moved_means_the_same_to_a_model():
    here, there = schema_of("here"), schema_of("delta:///there")

    assert (here.meaning, here.history_columns) == (there.meaning, there.history_columns)
    assert here.meaning != schema_of("here", max_length=MOST + 1).meaning


def test_a_history_of_no_event_is_refused_with_the_limits():
    document = schema_of("events").to_json()
    document["history"]["max_length"] = 0

    with pytest.raises(ConfigurationError, match=r"history\.max_length.*1"):
        type(schema_of("events")).from_json(document)
