"""Candidates of drawn requests: of each the user and the history are written in every row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from heterps_core.data.schema import DataSchema, SequenceColumn

SCHEMA = DataSchema(
    name="shown",
    label_column="click",
    request_column="request",
    request_columns=("age", "user", "items"),
    numeric_columns=("price", "age"),
    categorical_columns=("user", "item"),
    sequence_columns=(SequenceColumn(name="items", max_length=6),),
)


def request_columns(num_requests: int, *, most_candidates: int = 7, seed: int = 0) -> dict[str, list[Any]]:
    """Return columns of requests of one candidate to so many; about every fourth candidate is a click."""
    generator = np.random.default_rng(seed)
    columns: dict[str, list[Any]] = {
        name: [] for name in ("click", "request", "age", "user", "items", "price", "item")
    }
    for request in range(num_requests):
        user = int(generator.integers(40))
        items = [f"item {item}" for item in generator.integers(0, 30, int(generator.integers(9)))]
        for _ in range(int(generator.integers(1, most_candidates + 1))):
            item = int(generator.integers(30))
            values = (int(generator.random() < 0.25), f"r{request}", None if user == 3 else user / 10)
            values = (*values, f"user {user}", items, float(generator.random()), f"item {item}")
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
    return columns


def write_requests(path: Path, columns: dict[str, list[Any]], *, rows_per_group: int = 170) -> Path:
    """Write columns as Parquet."""
    table = pa.table({**columns, "items": pa.array(columns["items"], pa.list_(pa.string()))})
    pq.write_table(table, path, row_group_size=rows_per_group)
    return path
