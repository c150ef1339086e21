"""A million rows of shuffled times: their histories are those of a query, cost few bytes and little memory."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from heterps_core.data.preparation import prepare_dataset
from tests.heterps_core.data.history.event_rows import draw_events, draw_rows, schema_of, write

pytestmark = pytest.mark.weekly

NUM_ROWS, GROUP_ROWS, MOST = 1_000_000, 50_000, 50
DRAWN = {"num_times": 2_000_000, "num_keys": 10_000}

HISTORIES = f"""
    SELECT rows.id, list(struct_pack(t := e.seen_at, item := e.item::VARCHAR, action := e.action)
                         ORDER BY e.seen_at, e.item, e.action)[-{MOST}:] AS past
    FROM rows JOIN (SELECT * FROM events WHERE item IS NOT NULL) AS e
      ON e."user" = rows."user" AND e.seen_at < rows.seen_at
    GROUP BY rows.id ORDER BY rows.id
"""


def peak_bytes() -> int:
    """Return the most memory that this process had since the mark was reset."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return 1024 * int(line.split()[1])


def test_a_million_rows_see_no_later_event_at_half_the_bytes(tmp_path, record_property):
    rows = draw_rows(NUM_ROWS, seed=1, **DRAWN)
    events = draw_events(NUM_ROWS, seed=1, num_items=100_000, **DRAWN)
    written = {"row_group_size": GROUP_ROWS, "compression": "zstd"}
    source = write(rows, tmp_path / "rows.parquet", **written)
    schema = schema_of(write(events, tmp_path / "events.parquet"), max_length=MOST)
    dataset = prepare_dataset(
        source, schema=schema, buckets_per_slot=1_009, out_dir=tmp_path / "out" / "prepared"
    )
    connection = duckdb.connect(config={"memory_limit": "6GB", "temp_directory": str(tmp_path)})
    connection.register("rows", rows.append_column("id", pa.array(np.arange(NUM_ROWS))))
    connection.register("events", events)

    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    items, actions = (
        pa.chunked_array(texts)
        for texts in zip(*(dataset._groups.read(group).texts[-2:] for group in range(20)), strict=True)
    )
    num_peak_bytes = peak_bytes() - before
    found = connection.sql(HISTORIES).to_arrow_table()
    past = found["past"].combine_chunks()
    times, of_item, of_action = (pc.struct_field(past.values, index) for index in range(3))

    # Of rows with a history, each in one piece: the rest has none.
    has_past = pc.greater(pc.list_value_length(items), 0)
    assert np.flatnonzero(has_past).tolist() == found["id"].to_pylist()
    assert pc.list_flatten(items).cast(pa.string()).combine_chunks().equals(of_item)
    assert pc.list_flatten(actions).cast(pa.string()).combine_chunks().equals(of_action)
    assert pc.list_value_length(items.filter(has_past)).to_pylist() == pc.list_value_length(past).to_pylist()
    # The newest that each row sees, held against its time: none is of the future.
    newest = times.take(pc.subtract(past.offsets[1:], 1))
    assert pc.all(pc.less(newest, rows["seen_at"].filter(has_past))).as_py()

    fat = rows.append_column("past_items", items.cast(pa.list_(pa.string())))
    fat = write(
        fat.append_column("past_actions", actions.cast(pa.list_(pa.string()))), tmp_path / "fat", **written
    )
    stored = sum(path.stat().st_size for path in Path(dataset.directory).glob("events-*.arrow"))
    share = (source.stat().st_size + stored) / fat.stat().st_size
    record_property("bytes read by pointer, as a share of fat rows", share)
    print(
        f"{share:.2f} of the bytes of fat rows, {num_peak_bytes / 1e6:.0f} MB with the lists of all rows in memory"
    )
    assert share <= 0.5
    assert num_peak_bytes <= 1e9
