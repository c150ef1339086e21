"""Rows and events of shuffled times, their histories by a search of every event, and rows that have these in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.schema import DataSchema, EventHistory, SequenceColumn

NUM_KEYS, MOST = 40, 5

SCHEMA = DataSchema(
    name="views",
    label_column="click",
    categorical_columns=("user", "item"),
    tables={"item": "items", "past_items": "items"},
    history=EventHistory(
        table="events",
        key="user",
        time="seen_at",
        columns={"past_items": "item", "past_actions": "action"},
        max_length=MOST,
    ),
)


def schema_of(events: object, **changes: Any) -> DataSchema:
    history = replace(SCHEMA.history, **{"table": str(events)} | changes)
    tables = {name: table for name, table in SCHEMA.tables.items() if name in {"item", *history.columns}}
    return replace(SCHEMA, history=history, tables=tables)


def draw_events(
    num_events: int, *, seed: int, num_times: int = 300, num_keys: int = NUM_KEYS, num_items: int = 50
) -> pa.Table:
    """Events of few times, so that many are at one time; some lack an item."""
    generator = np.random.default_rng(seed)
    items = generator.integers(0, num_items, num_events)
    return pa.table(
        {
            "user": generator.integers(0, num_keys, num_events),
            "seen_at": generator.integers(0, num_times, num_events),
            "item": pa.array(items, mask=items == 7),
            "action": np.array(["view", "buy", "cart"])[generator.integers(0, 3, num_events)],
        }
    )


def draw_rows(num_rows: int, *, seed: int, num_times: int = 300, num_keys: int = NUM_KEYS) -> pa.Table:
    """Rows in no order of time; some users have no event."""
    generator = np.random.default_rng([seed, 1])
    return pa.table(
        {
            "click": generator.integers(0, 2, num_rows),
            "user": generator.integers(0, num_keys + 4, num_rows),
            "item": generator.integers(0, 50, num_rows),
            "seen_at": generator.integers(0, num_times, num_rows),
        }
    )


def histories(rows: pa.Table, events: pa.Table) -> list[list[tuple[str, str]]]:
    """Return items and actions of the last events of each row, found by looking at all events of its user."""
    of_user: dict[int, list[tuple[Any, ...]]] = {}
    for event in zip(
        *(events[name].to_pylist() for name in ("user", "seen_at", "item", "action")), strict=True
    ):
        if None not in event:
            of_user.setdefault(event[0], []).append(event[1:])
    return [
        [
            (str(item), action)
            for _, item, action in sorted(e for e in of_user.get(user, ()) if e[0] < time)[-MOST:]
        ]
        for user, time in zip(rows["user"].to_pylist(), rows["seen_at"].to_pylist(), strict=True)
    ]


def write(table: pa.Table, path: Path, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
    return path


def joined(dataset: PreparedDataset) -> list[list[tuple[str, str]]]:
    """Return items and actions of the histories that a data set joins."""
    # What reads their texts is not public: others want ids.
    groups = dataset._groups
    found = []
    for group in range(len(groups.starts) - 1):
        items, actions = (texts.to_pylist() for texts in groups.read(group).texts[-2:])
        found += [list(zip(*pair, strict=True)) for pair in zip(items, actions, strict=True)]
    return found


def fat(rows: pa.Table, events: pa.Table) -> tuple[pa.Table, DataSchema]:
    """Return the rows with their histories in lists, and the schema of these."""
    for index, name in enumerate(("past_items", "past_actions")):
        lists = pa.array(
            [[pair[index] for pair in of_row] for of_row in histories(rows, events)], pa.list_(pa.string())
        )
        rows = rows.append_column(name, lists)
    columns = tuple(
        SequenceColumn(name=name, max_length=MOST, history="past") for name in ("past_items", "past_actions")
    )
    return rows, replace(SCHEMA, history=None, sequence_columns=columns)
