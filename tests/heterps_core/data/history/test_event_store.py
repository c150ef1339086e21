"""A store of events is brought up to date by the files that are new, and by no others."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from heterps_core.data.history.event_store import STORE_NAME, find_events, link_events
from heterps_core.data.preparation import prepare_dataset
from tests.heterps_core.data.history.event_rows import (
    draw_events,
    draw_rows,
    histories,
    joined,
    schema_of,
    write,
)

ROWS, EVENTS = draw_rows(400, seed=2), draw_events(2_000, seed=2)


def stored(schema, folder: Path, name: str) -> dict[str, int]:
    """The files that a directory is linked to, by their inodes."""
    directory = folder / name
    directory.mkdir()
    link_events(find_events(schema.history), folder, directory)
    return {path.name: path.stat().st_ino for path in directory.glob("*.arrow")}


def test_a_late_file_makes_only_the_files_of_its_keys_new(tmp_path):
    schema = schema_of(write(EVENTS, tmp_path / "events" / "2.parquet").parent)
    before = stored(schema, tmp_path, "before")
    assert stored(schema, tmp_path, "again") == before
    late = EVENTS.filter(pc.equal(EVENTS["user"], 3))[:5]

    write(late, tmp_path / "events" / "1.parquet")
    after = stored(schema, tmp_path, "after")

    assert len(before) > 20
    assert len(before.items() - after.items()) == len(after.items() - before.items()) == 1
    # What is linked already stays as it is.
    assert {path.name for path in (tmp_path / "before").glob("*.arrow")} == before.keys()


def test_late_events_are_seen_as_if_they_had_always_been_there(tmp_path):
    folder = tmp_path / "events"
    schema = schema_of(folder)
    rows = write(ROWS, tmp_path / "rows.parquet")

    for number, part in enumerate((EVENTS[1_500:], EVENTS[:700], EVENTS[700:1_500])):
        write(part, folder / f"{9 - number}.parquet")
        dataset = prepare_dataset(
            rows, schema=schema, buckets_per_slot=61, out_dir=tmp_path / "out" / "prepared"
        )

    assert joined(dataset) == histories(ROWS, EVENTS)
    assert dataset.events.version == 3


@pytest.mark.parametrize("change", ["gone", "rewritten", "other type"])
def test_files_that_changed_make_the_store_again(tmp_path, change):
    folder = tmp_path / "events"
    schema, rows = schema_of(folder), write(ROWS, tmp_path / "rows.parquet")
    write(EVENTS[:1_000], folder / "1.parquet")
    write(EVENTS[1_000:], folder / "2.parquet")
    out = {"schema": schema, "buckets_per_slot": 61, "out_dir": tmp_path / "out" / "prepared"}
    prepare_dataset(rows, **out)

    left = EVENTS[:1_000]
    if change == "gone":
        (folder / "2.parquet").unlink()
    elif change == "rewritten":
        left = pa.concat_tables([left, EVENTS[1_200:]])
        write(EVENTS[1_200:], folder / "2.parquet")
    else:
        left = EVENTS
        items = EVENTS["item"][1_000:].cast(pa.float64())
        write(EVENTS[1_000:].set_column(2, "item", items), folder / "2.parquet")

    assert joined(prepare_dataset(rows, **out)) == histories(ROWS, left)


def test_an_update_that_was_cut_off_counts_no_event_twice(tmp_path):
    schema = schema_of(write(EVENTS[:1_000], tmp_path / "events" / "1.parquet").parent)
    stored(schema, tmp_path, "first")
    (place,) = tmp_path.glob("events-*")
    as_it_was = (place / STORE_NAME).read_bytes()
    kept = {path.name: path.read_bytes() for path in place.glob("*.arrow")}
    write(EVENTS[1_000:], tmp_path / "events" / "2.parquet")
    expected = sum((tmp_path / "second" / name).stat().st_size for name in stored(schema, tmp_path, "second"))

    (place / "tmp_of_a_killed_process").mkdir()
    # As it is left where the list of files was not yet written.
    (place / STORE_NAME).write_bytes(as_it_was)
    for name, content in kept.items():
        (place / name).write_bytes(content)

    found = stored(schema, tmp_path, "third")
    assert sum((tmp_path / "third" / name).stat().st_size for name in found) == expected
    assert not [*place.glob("tmp*")]


def test_a_store_that_cannot_be_read_is_made_again_beside_the_files_that_a_run_has(tmp_path):
    schema = schema_of(write(EVENTS, tmp_path / "events" / "1.parquet").parent)
    before = stored(schema, tmp_path, "before")
    content = {name: (tmp_path / "before" / name).read_bytes() for name in before}
    (place,) = tmp_path.glob("events-*")
    (place / STORE_NAME).write_text("{")
    write(EVENTS[:50], tmp_path / "events" / "2.parquet")

    stored(schema, tmp_path, "after")

    assert {name: (tmp_path / "before" / name).read_bytes() for name in before} == content
