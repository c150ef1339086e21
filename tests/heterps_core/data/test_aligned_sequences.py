"""Sequences of one history hold values of the same events: as many in each row, and each in its place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data.features import NO_ID
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import DataSchema, SequenceColumn
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.serving.raw_columns import model_input

SCHEMA = DataSchema(
    name="views",
    label_column="click",
    categorical_columns=("site",),
    sequence_columns=tuple(
        SequenceColumn(name=name, max_length=3, history="views") for name in ("items", "actions")
    ),
)
ROWS = {
    "click": [0, 1, 0, 1, 1],
    "site": ["a"] * 5,
    "items": [["1", "2"], [], ["3", None, "4", "5"], ["1"], ["2", "2", "2"]],
    "actions": [["buy", "see"], None, ["see", "buy", None, "see"], ["see"], ["buy", "buy", "see"]],
}


def write(folder, rows, *, is_text=False):
    if not is_text:
        pq.write_table(pa.table(rows), folder / "rows.parquet", row_group_size=2)
        return folder / "rows.parquet"
    lines = [",".join(rows)]
    for values in zip(*rows.values(), strict=True):
        fields = ["|".join(each or ()) if isinstance(each, list | None) else each for each in values]
        lines.append(",".join(map(str, fields)))
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    return folder / "rows.csv"


def test_a_missing_value_keeps_its_place(tmp_path):
    dataset = prepare_dataset(
        write(tmp_path, ROWS), schema=SCHEMA, buckets_per_slot=1_000, out_dir=tmp_path / "out"
    )

    ids = np.concatenate([part.ids for part in dataset.parts(0, 5)])

    items, actions = ids[:, 1:4], ids[:, 4:7]
    assert dataset.features.slot_histories == (0, 1, 1)
    assert np.array_equal(items == NO_ID, actions == NO_ID)
    # The last three of four, whose first item and middle action are missing; an empty history has a missing value.
    assert (items[2] == 0).tolist() == [True, False, False]
    assert (actions[2] == 0).tolist() == [False, True, False]
    assert items[1].tolist() == actions[1].tolist() == [0, NO_ID, NO_ID]


@pytest.mark.parametrize("is_text", [False, True])
def test_a_row_with_unequal_sequences_is_named(is_text, tmp_path):
    rows = ROWS | {"actions": [["buy", "see"], [], ["see"], ["see"], ["buy", "buy", "see"]]}
    rows |= {"items": [["1", "2"], [], ["3", "9", "4", "5"], ["1"], ["2", "2", "2"]]}

    with pytest.raises(DataError, match="as many values in a row, got 4 in items, 1 in actions") as caught:
        prepare_dataset(
            write(tmp_path, rows, is_text=is_text),
            schema=SCHEMA,
            buckets_per_slot=1_000,
            out_dir=tmp_path / "out",
        )

    assert ("line 4" if is_text else "row 3") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_served_model_names_the_row(tmp_path):
    dataset = prepare_dataset(
        write(tmp_path, ROWS), schema=SCHEMA, buckets_per_slot=1_000, out_dir=tmp_path / "out"
    )
    columns = {"site": ["a", "a"], "items": [["1"], ["1", "2"]], "actions": [["buy"], ["buy"]]}

    with pytest.raises(DataError, match=r"row 2: .* got 2 in items, 1 in actions"):
        model_input(columns, SCHEMA, dataset.manifest.numeric_transform, dataset.features)


def test_columns_of_one_history_have_one_max_length():
    items, actions = SCHEMA.sequence_columns
    with pytest.raises(ConfigurationError, match="must have one max_length, got 3 of items, 4 of actions"):
        replace(SCHEMA, sequence_columns=(items, replace(actions, max_length=4)))


def test_rows_of_one_history_mean_something_else():
    apart = replace(
        SCHEMA, sequence_columns=tuple(replace(each, history="") for each in SCHEMA.sequence_columns)
    )

    assert apart.meaning != SCHEMA.meaning
    assert apart.histories == ()
