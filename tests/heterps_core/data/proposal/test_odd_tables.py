"""Whatever a table holds, its rows can be read by the schema that is proposed, or one line says why there is none."""

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.commands.data.init import _write_toml
from heterps_core.data.proposal.column_roles import CATEGORICAL, LEFT_OUT, TIME
from heterps_core.data.proposal.schema_proposal import propose_schema
from heterps_core.data.reading.readers import check_columns, read_rows
from heterps_core.data.reading.time_order import check_time_order
from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError
from tests.heterps_core.data.odd_tables import (
    NUM_ROWS,
    ODD_COLUMNS,
    ODD_LABELS,
    ODD_NAMES,
    ODD_TEXTS,
    clicks,
)


def read_as_proposed(file, **options) -> int:
    """Return the number of rows that are read by the schema that is proposed, written and read again."""
    proposed = propose_schema(file, source=str(file), **options)
    written = file.with_suffix(".toml")
    _write_toml(written, proposed.schema, data=str(file))
    schema = DataSchema.load(written)
    assert schema == proposed.schema
    assert all("\n" not in line for line in proposed.table().lines())
    check_columns(file, schema)
    return sum(len(batch.labels) for batch in read_rows([file], schema))


@pytest.mark.parametrize("name", ODD_COLUMNS)
def test_a_table_with_a_column_of_any_type_can_be_read_as_proposed(tmp_path, name):
    pq.write_table(clicks(odd=ODD_COLUMNS[name]), tmp_path / "x.parquet", row_group_size=100)

    assert read_as_proposed(tmp_path / "x.parquet") == NUM_ROWS


def test_names_of_any_kind_can_be_read_as_proposed(tmp_path):
    table = clicks(**{name: [f"t{row % 5}" for row in range(NUM_ROWS)] for name in ODD_NAMES})
    pq.write_table(table.append_column("site", table["price"]), tmp_path / "x.parquet")

    proposed = propose_schema(tmp_path / "x.parquet", source="x")

    assert read_as_proposed(tmp_path / "x.parquet") == NUM_ROWS
    assert set(proposed.schema.categorical_columns) == {*ODD_NAMES} - {""}
    remarks = {seen.values.name: seen.remark for seen in proposed.columns if seen.role == LEFT_OUT}
    assert remarks == {"": "has no name", "site": "stands there 2 times: write the columns with other names"}


@pytest.mark.parametrize(
    ("texts", "role", "remark"),
    [
        (["5,79", "0,5"], CATEGORICAL, "numbers as texts, such as '5,79'"),
        (["1,234.50", "20"], CATEGORICAL, "numbers as texts, such as '1,234.50'"),
        (["$5", "€0.50"], CATEGORICAL, "numbers as texts, such as '$5'"),
        (["12.5%", "3 %"], CATEGORICAL, "numbers as texts, such as '12.5%'"),
        (["['a', 'b']", "[]"], CATEGORICAL, "lists as texts, such as \"['a', 'b']\""),
        (["Drama", "Action|Comedy"], CATEGORICAL, "lists as texts, such as 'Action|Comedy'"),
        (["a^b", "c", "^"], CATEGORICAL, "lists as texts, such as 'a^b'"),
        (["|", "a|", ":^"], CATEGORICAL, ""),
        (["0123", "4567"], CATEGORICAL, ""),
        (["1.2.3", "1.2"], CATEGORICAL, ""),
        (["5,79", "?", "0,5"], CATEGORICAL, "numbers as texts, such as '5,79'"),
        ([f"1,{row:03}" for row in range(NUM_ROWS)], LEFT_OUT, "numbers as texts, such as '1,000'"),
    ],
    ids=str,
)
def test_texts_that_are_written_numbers_or_lists_are_remarked(tmp_path, texts, role, remark):
    odd = [texts[row % len(texts)] for row in range(NUM_ROWS)]
    pq.write_table(clicks(odd=odd), tmp_path / "x.parquet")

    (seen,) = (
        seen
        for seen in propose_schema(tmp_path / "x.parquet", source="x").columns
        if seen.values.name == "odd"
    )

    assert seen.role == role
    assert seen.remark.startswith(remark) if remark else not seen.remark


def test_the_index_that_pandas_writes_is_no_feature(tmp_path):
    frame = clicks().to_pandas()
    frame = frame[frame.price > 10]
    frame.to_parquet(tmp_path / "x.parquet")
    frame.to_csv(tmp_path / "once.csv")
    pd.read_csv(tmp_path / "once.csv").to_csv(tmp_path / "x.csv", index=False)

    for name in ("x.parquet", "x.csv"):
        assert propose_schema(tmp_path / name, source="x").schema.numeric_columns == ("price",)


@pytest.mark.parametrize("name", ODD_TEXTS)
def test_a_text_with_something_odd_is_read_as_proposed_or_refused_in_one_line(tmp_path, name):
    content, refusal = ODD_TEXTS[name]
    (tmp_path / "x.csv").write_bytes(content)

    if not refusal:
        assert read_as_proposed(tmp_path / "x.csv") == NUM_ROWS
        return
    with pytest.raises(DataError, match=refusal) as refused:
        propose_schema(tmp_path / "x.csv", source="x")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ODD_LABELS)
def test_a_label_of_any_type_is_read_as_proposed_or_refused_in_one_line(tmp_path, name):
    column, refusal = ODD_LABELS[name]
    pq.write_table(clicks().set_column(0, "label", column), tmp_path / "x.parquet")

    if not refusal:
        assert read_as_proposed(tmp_path / "x.parquet") == NUM_ROWS
        return
    with pytest.raises(DataError, match=refusal) as refused:
        propose_schema(tmp_path / "x.parquet", source="x")
    assert "\n" not in str(refused.value)


def test_a_text_of_hive_without_header_is_read_by_the_names_that_are_given(tmp_path):
    names = ["label", "price", "site"]
    rows = [
        [str(row * 7 % 5 // 3), "\\N" if row % 7 == 0 else f"{row}.5", f"s{row % 7}"] for row in range(90)
    ]
    (tmp_path / "000000_0").write_text("".join("\x01".join(fields) + "\n" for fields in rows))

    proposed = propose_schema(tmp_path / "000000_0", source="x", column_names=names)

    assert proposed.num_rows == 90
    assert (proposed.schema.separator, proposed.schema.missing_markers) == ("\x01", ("\\N",))
    assert read_as_proposed(tmp_path / "000000_0", column_names=names) == 90


def test_the_separator_gives_as_many_fields_as_names_are_given(tmp_path):
    rows = [f"{row * 7 % 5 // 3}^a,b,c,{row % 7}^{row}.5\n" for row in range(90)]
    (tmp_path / "x.txt").write_text("".join(rows))

    assert read_as_proposed(tmp_path / "x.txt", column_names=["label", "site", "price"]) == 90


SECONDS = [1_700_000_000 + 20 * row for row in range(NUM_ROWS)]
SHUFFLED = [SECONDS[row * 7 % NUM_ROWS] for row in range(NUM_ROWS)]


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("timestamp", pa.array(SECONDS)),
        ("timestamp", pa.array(SHUFFLED)),
        ("created_at", pa.array([each * 1_000 for each in SHUFFLED])),
        ("eventTime", pa.array([each * 10**6 for each in SHUFFLED], pa.float64())),
        ("ts", pa.array([each * 10**9 for each in SHUFFLED])),
        ("x", pa.array(SECONDS)),
        ("time", pa.array([0 if row == 7 else each for row, each in enumerate(SECONDS)])),
        ("hour", pa.array([14_102_100 + row // 10 for row in range(NUM_ROWS)])),
        ("day", pa.array([20_261_101 + row * 7 % 29 for row in range(NUM_ROWS)])),
        ("x", pa.array([2_026_110_100 + row // 11 for row in range(NUM_ROWS)])),
        ("x", pa.array([f"2026-11-{1 + row // 10:02d} 10:00:00" for row in range(NUM_ROWS)])),
        ("x", pa.array([f"2026-11-{1 + row // 10:02d}" for row in range(NUM_ROWS)])),
        ("x", pa.array(SHUFFLED, pa.timestamp("ns", "UTC"))),
        ("x", pa.array([row // 10 for row in range(NUM_ROWS)], pa.date32())),
    ],
)
@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_a_time_is_no_feature_and_its_order_is_checked(tmp_path, name, times, form):
    file = tmp_path / f"x.{form}"
    table = clicks(**{name: times})
    if form == "parquet":
        pq.write_table(table, file)
    else:
        lines = [",".join(map(str, row.values())) for row in table.to_pylist()]
        file.write_text("\n".join([",".join(table.column_names), *lines]) + "\n")

    proposed = propose_schema(file, source="x")

    assert proposed.schema.time_column == name
    assert name not in proposed.schema.used_columns
    known = times.to_pylist()
    if known == sorted(known):
        check_time_order([file], proposed.schema)
        return
    with pytest.raises(DataError, match=f"rows must be in the order of {name}"):
        check_time_order([file], proposed.schema)
    remark = next(seen.remark for seen in proposed.columns if seen.role == TIME)
    assert remark.startswith("rows are not in its order")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("user_id", [1_500_000_000 + row * 7_919 % 30 for row in range(NUM_ROWS)]),
        ("user_id", [1_500_000_000 + row // 3 for row in range(NUM_ROWS)]),
        ("amount", [1_500_000_000 + row * 7_919 % 1_000 for row in range(NUM_ROWS)]),
        ("x", [30_261_101 + row // 10 for row in range(NUM_ROWS)]),
        ("hour", [row % 24 for row in range(NUM_ROWS)]),
        ("hour", [row // 10 for row in range(NUM_ROWS)]),
        ("price_at", [row * 3 % 100 for row in range(NUM_ROWS)]),
    ],
)
def test_numbers_that_are_no_times_stay_features(tmp_path, name, values):
    pq.write_table(clicks(**{name: values}), tmp_path / "x.parquet")

    schema = propose_schema(tmp_path / "x.parquet", source="x").schema

    assert schema.time_column is None
    assert name in schema.used_columns


def test_of_columns_of_times_the_one_that_rows_are_in_order_of_is_proposed(tmp_path):
    born = pa.array([row * 7_919 % 9_000 for row in range(NUM_ROWS)], pa.date32())
    with_gaps = pa.array([None if row == 3 else row for row in range(NUM_ROWS)], pa.timestamp("s"))
    day = pa.array([20_261_101 + row // 100 for row in range(NUM_ROWS)])
    table = clicks(born=born, gone=with_gaps, day=day, shown_at=SECONDS, seen_at=SHUFFLED)
    pq.write_table(table, tmp_path / "x.parquet")

    proposed = propose_schema(tmp_path / "x.parquet", source="x")

    assert proposed.schema.time_column == "shown_at"
    assert proposed.schema.used_columns == ("label", "price", "site")
    remarks = {seen.values.name: seen.remark for seen in proposed.columns}
    assert "0.4% of the rows have none" in remarks["gone"]
    assert remarks["born"] == remarks["seen_at"] == remarks["day"] == remarks["shown_at"]
    assert read_as_proposed(tmp_path / "x.parquet") == NUM_ROWS


@pytest.mark.parametrize(
    "name", ["id", "user id", "user_id", "userId", "userID", "user.id", "userid", "ad-ids", "zip code"]
)
@pytest.mark.parametrize("kind", [pa.int64(), pa.float64()])
def test_a_number_that_is_called_an_id_is_a_category(tmp_path, name, kind):
    values = pa.array([None if row % 9 == 0 else 10_000_000 + row % 60 for row in range(NUM_ROWS)], kind)
    pq.write_table(clicks(**{name: values}), tmp_path / "x.parquet")

    schema = propose_schema(tmp_path / "x.parquet", source="x").schema

    assert schema.categorical_columns == ("site", name)


@pytest.mark.parametrize("name", ["paid", "bid", "width", "num_ids_seen", "valid"])
def test_a_number_that_ends_like_an_id_stays_a_number(tmp_path, name):
    pq.write_table(clicks(**{name: range(NUM_ROWS)}), tmp_path / "x.parquet")

    assert name in propose_schema(tmp_path / "x.parquet", source="x").schema.numeric_columns


@pytest.mark.parametrize(
    ("name", "positive", "negative"),
    [
        ("label 2 and 1", ("1",), ("2",)),
        ("label 1 and -1", ("1",), ("-1",)),
        ("label Yes, yes and no", ("Yes", "yes"), ("no", "NO")),
        ("label 1, 1.0 and 0", ("1", "1.0"), ("0",)),
        ("label of dates", ("2026-11-01",), ("2026-11-02",)),
    ],
)
def test_a_click_is_the_value_that_is_called_so_else_the_rarer_one(tmp_path, name, positive, negative):
    (tmp_path / "x.csv").write_bytes(ODD_TEXTS[name][0])

    schema = propose_schema(tmp_path / "x.csv", source="x").schema

    assert (schema.label_positive, schema.label_negative) == (positive, negative)


def test_numbers_that_the_reader_refuses_are_left_out_with_its_words(tmp_path):
    numbers, counts = (
        [f"0x{each:X}" for each in of] for of in (range(300, 540), (4 ** (n % 14) for n in range(240)))
    )
    rows = [f"{row * 7 % 5 // 3},s{row % 7},{numbers[row]},{counts[row]}{row % 9}" for row in range(NUM_ROWS)]
    (tmp_path / "x.csv").write_text("\n".join(["label,site,address,size", *rows]) + "\n")

    proposed = propose_schema(tmp_path / "x.csv", source="x")

    left_out = {seen.values.name: seen.remark for seen in proposed.columns if seen.role == LEFT_OUT}
    assert [*left_out] == ["address", "size"]
    assert all("must be a finite number or empty, got '0x" in remark for remark in left_out.values())
    assert read_as_proposed(tmp_path / "x.csv") == NUM_ROWS


def test_all_row_groups_of_the_sample_are_looked_at(tmp_path):
    ids = pa.array([2.0**60 if row == 200 else float(row % 60) for row in range(NUM_ROWS)])
    pq.write_table(clicks(user_id=ids), tmp_path / "x.parquet", row_group_size=100)

    proposed = propose_schema(tmp_path / "x.parquet", source="x")

    remark = next(seen.remark for seen in proposed.columns if seen.values.name == "user_id")
    assert remark.startswith("is refused: column user_id must hold categories that differ from each other")
    assert read_as_proposed(tmp_path / "x.parquet") == NUM_ROWS
