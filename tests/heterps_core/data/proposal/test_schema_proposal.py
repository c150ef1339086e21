"""Columns that hold ids of one kind are proposed to share a table."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data.proposal.schema_proposal import propose_schema


@pytest.mark.parametrize(
    ("first_seen", "num_items", "tables"),
    [
        (0, 400, {"item": "item", "seen": "item"}),
        # Other values, and so few that they may be equal by chance.
        (400, 400, {}),
        (0, 20, {}),
    ],
)
def test_lists_of_a_columns_values_share_its_table(first_seen, num_items, tables, tmp_path):
    generator = np.random.default_rng(0)
    items = generator.integers(0, num_items, 3_000)
    lists = [
        [f"item {first_seen + value}" for value in generator.integers(0, num_items, length)]
        for length in generator.integers(0, 6, 3_000)
    ]
    columns = {
        "click": generator.integers(0, 2, 3_000),
        "site": [f"site {value}" for value in generator.integers(0, 100, 3_000)],
        "item": [f"item {value}" for value in items],
        "seen": lists,
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")

    proposed = propose_schema(tmp_path / "rows.parquet", source="rows")

    assert proposed.schema.tables == tables
    remarks = {seen.values.name: seen.remark for seen in proposed.columns}
    assert ("shares a table with item" in remarks["seen"]) == bool(tables)
    assert "shares" not in remarks["item"] + remarks["site"]
