"""One value has one text and one id, whatever type, spelling, container or reader it comes through."""

from __future__ import annotations

import csv
import datetime as dt
import random
import uuid
from dataclasses import replace
from decimal import Decimal
from io import StringIO

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data.distinct_values import ValueCounter
from heterps_core.data.features import FIRST_TEXT_RULE
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.reading.canonical_text import canonical_text
from heterps_core.data.reading.column_texts import canonical_texts, column_texts
from heterps_core.data.schema import DataSchema, MultiHotColumn
from heterps_core.errors import DataError
from heterps_core.serving.raw_columns import model_input

SCHEMA = DataSchema(name="one column", label_column="click", categorical_columns=("id",))
LISTS = DataSchema(
    name="lists", label_column="click", multi_hot_columns=(MultiHotColumn(name="id", max_length=2),)
)
FEATURES = SCHEMA.features([100_003])
NONE = NumericTransform(is_count=(), means=(), standard_deviations=())
MIDNIGHT, NOON = dt.datetime(2026, 11, 1), dt.datetime(2026, 11, 1, 12, 0, 0, 500_000)
BERLIN = dt.timezone(dt.timedelta(hours=1))
UUID = uuid.UUID("03d27bde-fb28-4c0c-81ae-a802d9276d8e")


def served(values):
    return model_input({"id": values}, SCHEMA, NONE, FEATURES)[1][:, 0].tolist()


def read(path, tmp_path, schema=SCHEMA):
    dataset = prepare_dataset(
        path, schema=schema, buckets_per_slot=100_003, eval_fraction=0.0, out_dir=tmp_path / "prepared"
    )
    return np.concatenate([rows.ids for rows in dataset.parts(0, dataset.num_train_rows)])[:, 0].tolist()


def read_parquet(values, tmp_path):
    labels = pa.array([0, 1] * len(values), pa.int8())[: len(values)]
    pq.write_table(pa.table({"click": labels, "id": values}), tmp_path / "rows.parquet")
    return read(tmp_path / "rows.parquet", tmp_path)


def read_csv(fields, tmp_path):
    rows = "".join(f"{number % 2},{field}\n" for number, field in enumerate(fields))
    (tmp_path / "rows.csv").write_text(f"click,id\n{rows}")
    return read(tmp_path / "rows.csv", tmp_path)


FORMS = {
    "5": [
        *(5, 5.0, Decimal("5.00"), "5", "5.0", "5.", "+5", " 5 ", "005", "5e0", b"5", np.int8(5)),
        *(np.float32(5), np.str_("5"), pa.scalar(5, pa.uint64()), pa.scalar("5", pa.large_string())),
    ],
    "10000000000": [10**10, 1e10, "1e10", "1E+10", "1.0e10", "10000000000.0", Decimal("1E+10")],
    "-0.5": [-0.5, "-0.50", "-.5", Decimal("-0.500"), np.float32(-0.5), np.float16(-0.5)],
    "0.1": [0.1, np.float32(0.1), "0.10", ".1", "1e-1"],
    "0": [0, -0.0, "-0", "0.0", "00", False, "False", "false", "FALSE", np.False_],
    "1": [1, True, "True", "true", "TRUE", np.True_, "1.0"],
    "9007199254740993": [2**53 + 1, "9007199254740993", Decimal(2**53 + 1), "9007199254740993.0"],
    "2026-11-01": [
        *(dt.date(2026, 11, 1), MIDNIGHT, pd.Timestamp(MIDNIGHT), np.datetime64("2026-11-01")),
        *("2026-11-01", "2026-11-01 00:00:00", "2026-11-01T00:00:00Z", "2026-11-01 00:00"),
        *("2026-11-01 00:00:00.000000", "2026-11-01 01:00:00+01:00", MIDNIGHT.replace(tzinfo=dt.UTC)),
        pa.scalar(MIDNIGHT, pa.timestamp("ns")),
    ],
    "2026-11-01 12:00:00.5": [
        *(NOON, "2026-11-01 12:00:00.500", "2026-11-01T13:00:00.5+0100", "2026-11-01 12:00:00.5 UTC"),
        *(pd.Timestamp(NOON, tz="UTC"), NOON.replace(hour=13, tzinfo=BERLIN)),
    ],
    "12:30:00": [dt.time(12, 30), "12:30:00.000", "12:30:00"],
    "": [
        None,
        float("nan"),
        pd.NA,
        pd.NaT,
        np.datetime64("NaT", "ns"),
        "",
        "  ",
        "nan",
        "NaN",
        "None",
        "<NA>",
    ],
    str(UUID): [UUID, str(UUID)],
    "inf": [float("inf"), "inf"],
    "a": ["a", " a", "a ", b"a", pa.scalar(b"a", pa.large_binary()), pa.scalar("a", pa.string_view())],
}
"""Of one value each, by its canonical text."""

OTHERS = [
    "NA",
    "Trueish",
    "1,000",
    "1_000",
    "01/11/2026",
    "2026-13-01 00:00",
    "5e250000",
    "0x5",
    "٥",
    "1e",
    "-",
]


@pytest.mark.parametrize("text", FORMS)
def test_all_forms_of_a_value_have_one_text_and_one_id(text, tmp_path):
    ids = {served([text])[0]}
    for form in FORMS[text]:
        plain = np.array([form]) if isinstance(form, np.generic) else [form]
        kept = form if isinstance(form, pa.Scalar) else pa.array(plain, from_pandas=True)[0]
        assert canonical_text(column_texts(pa.array([kept]))[0].as_py() or "") == text, form
        ids |= {*served([form]), *served(pd.Series([form])), *read_parquet(pa.array([kept]), tmp_path)}
        if isinstance(form, str):
            ids |= {*read_csv([f'"{form}"'], tmp_path)}
    assert len(ids) == 1
    assert (ids == {0}) == (text == "")


def test_canonical_texts_stay_and_differ_from_each_other():
    texts = [*FORMS, *OTHERS]

    assert [canonical_text(text) for text in texts] == texts
    assert len({*served(texts)}) == len(texts)


@pytest.mark.parametrize("length", [4, 9, 24])
def test_a_column_is_written_as_each_of_its_values(length):
    draw = random.Random(length)
    texts = [
        "".join(draw.choices("0123456789eE+-. :TZUCaNnrutfls<>\té", k=draw.randrange(length)))
        for _ in range(20_000)
    ]
    texts += [f"{draw.random() * 10:.2f}" for _ in range(2_000)]
    texts += [f"{number}.0" for number in range(2_000)]
    texts += [f"{draw.getrandbits(32):08x}" for _ in range(20_000)]
    texts += ["2026-11-01 12:30:00.000000", None, *OTHERS]
    expected = [None if text is None else canonical_text(text) for text in texts]

    for first in range(0, len(texts), 5_000):
        part = pa.array(texts)[first : first + 5_000]
        assert canonical_texts(part).to_pylist() == expected[first : first + 5_000]
    assert [canonical_text(text) for text in expected if text is not None] == [
        text for text in expected if text is not None
    ]


@pytest.mark.parametrize("texts", [[], [""], [None, ""], ["", "5.0", ""], ["005", "5"], ["x", "", "1.0", ""]])
def test_short_columns_are_written_as_each_of_their_values(texts):
    column = pa.array([*texts, "in front"], pa.string())[: len(texts)]

    assert canonical_texts(column).to_pylist() == [text and canonical_text(text) for text in texts]


DATES = [
    ["2026-11-01", "2026-11-02", ""],
    ["2026-11-01 00:00:00", "2026-11-02 10:30:00", ""],
]
FIELDS = [
    ["True", "False", "True"],
    ["True", "", "False"],
    ["3.0", "4", "3"],
    ["3", "", "4"],
    ["3000000000007", "", "3000000000008"],
    ["007", "012", "7"],
    ["1e10", "2.5", "10000000000"],
    ["+5", " 6", "7 "],
    ["0.50", "1.25", "0.5"],
    ["12345e06", "00123456", "98765432"],
    ["68fd1e64", "12345e06", "05db9164"],
    ["nan", "None", "x"],
    *DATES,
]


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        *((fields, {}) for fields in FIELDS),
        *((fields, {"dtype_backend": "numpy_nullable"}) for fields in FIELDS),
        *((fields, {"parse_dates": ["id"]}) for fields in DATES),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else next(iter(given), "plain"),
)
@pytest.mark.filterwarnings("ignore:Could not infer format")
def test_rows_that_pandas_reads_have_the_ids_of_training_on_the_same_file(fields, options, tmp_path):
    trained = read_csv(fields, tmp_path)

    frame = pd.read_csv(tmp_path / "rows.csv", **options)

    assert served(frame["id"]) == trained
    frame.to_parquet(tmp_path / "pandas.parquet")
    assert read(tmp_path / "pandas.parquet", tmp_path) == trained


def test_ids_with_a_missing_one_among_them_stay_as_they_were(tmp_path):
    ids = [3_000_000_000_000 + number for number in range(200)]
    complete = served(ids)

    frame = pd.DataFrame({"id": ids})
    frame.loc[0, "id"] = np.nan

    assert frame["id"].dtype == float
    assert served(frame["id"]) == [0, *complete[1:]]
    assert served(frame["id"].tolist()) == [0, *complete[1:]]
    assert read_parquet(pa.array(frame["id"], from_pandas=True), tmp_path) == [0, *complete[1:]]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (pd.Series([2.0**53, np.nan]), "9007199254740992 as a double"),
        ([1e300], "as a double"),
        (np.array([16_777_216.0], np.float32), "16777216 as a float, which is exact below 16777216 only"),
    ],
)
def test_floating_ids_whose_digits_may_be_lost_are_refused(values, shown, tmp_path):
    with pytest.raises(DataError, match=f"column id must hold categories that differ.*{shown}.*int64"):
        served(values)
    with pytest.raises(DataError, match=rf"rows.*\.parquet: column id must hold.*{shown}"):
        read_parquet(pa.array(values, from_pandas=True), tmp_path)


def test_durations_are_refused_as_their_numbers_depend_on_the_unit(tmp_path):
    values = pa.array([dt.timedelta(seconds=5)])

    with pytest.raises(
        DataError, match=r"column id must hold values that say their unit, got duration\[us\]"
    ):
        served(values)
    with pytest.raises(
        DataError, match=r"column id must hold values that say their unit, got duration\[us\]"
    ):
        read_parquet(values, tmp_path)


def test_values_in_lists_are_those_of_single_ones():
    lists = [[5, 7], ["5.0"], [None, "nan"], "5.0|7", 5, None, np.array([7.0])]

    found = model_input({"id": lists}, LISTS, NONE, LISTS.features([100_003]))[1]

    first, second = served([5, 7])
    five, missing = [first, -1], [0, -1]
    assert found.tolist() == [[first, second], five, missing, [first, second], five, missing, [second, -1]]


def test_a_missing_marker_is_found_in_any_form(tmp_path):
    schema = replace(SCHEMA, missing_markers=("-1", "1970-01-01"))
    values = [-1, -1.0, "-1.0", dt.datetime(1970, 1, 1), "x"]

    found = [model_input({"id": [value]}, schema, NONE, FEATURES)[1][0, 0] for value in values]

    assert [bool(each) for each in found] == [False] * 4 + [True]
    pq.write_table(
        pa.table({"click": [0, 1], "id": [dt.date(1970, 1, 1), dt.date(1970, 1, 2)]}),
        tmp_path / "rows.parquet",
    )
    assert [each > 0 for each in read(tmp_path / "rows.parquet", tmp_path, schema)] == [False, True]


def test_forms_of_a_value_are_counted_as_one():
    counter = ValueCounter()
    counter.add(pa.array(["5", "5.0", "nan", "005", "7"]))

    assert (counter.num_values, counter.num_missing) == (2, 1)


def test_a_model_of_the_first_rule_takes_texts_as_they_are_written():
    first = replace(FEATURES, text_rule=FIRST_TEXT_RULE)
    values = ["5", "5.0", "True", "1"]

    found = model_input({"id": values}, SCHEMA, NONE, first)[1][:, 0].tolist()

    assert len({*found}) == 4
    assert found[0] == served(["5"])[0]


def test_texts_that_a_csv_writer_makes_of_values_are_theirs(tmp_path):
    values = [True, 5.0, Decimal("0.50"), MIDNIGHT, dt.date(2026, 11, 2), NOON, None, 3e10]
    written = StringIO()
    csv.writer(written).writerows([value] for value in values)

    assert read_csv(written.getvalue().splitlines(), tmp_path) == [served([value])[0] for value in values]
