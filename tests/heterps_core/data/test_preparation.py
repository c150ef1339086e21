import math
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data import preparation, training_rows
from heterps_core.data.features import FIRST_TEXT_RULE, TEXT_RULE
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.reading import text_conversion
from heterps_core.data.reading.canonical_text import canonical_text
from heterps_core.data.reading.readers import read_rows
from heterps_core.data.schema import CRITEO_SCHEMA, DataSchema, MultiHotColumn
from heterps_core.errors import DataError
from tests.heterps_core.data.synthetic_rows import (
    all_rows,
    criteo_fields,
    criteo_lines,
    held_out_labels,
    prepare,
    rows_of_texts,
    write_lines,
    write_parquet,
)


@pytest.fixture
def source(tmp_path):
    return write_lines(tmp_path / "rows.tsv", criteo_lines(103))


def test_rows_stay_in_file_order_and_the_latest_are_held_out(source, tmp_path):
    dataset = prepare(source, tmp_path / "out")

    assert (dataset.num_train_rows, dataset.num_eval_rows) == (82, 21)
    assert all_rows(dataset).labels.tolist() == [int(number % 3 == 0) for number in range(103)]
    assert held_out_labels(dataset).tolist() == all_rows(dataset).labels.tolist()[82:]


def test_ids_are_the_hashed_values_of_each_row(source, tmp_path):
    dataset = prepare(source, tmp_path / "out")
    (batch,) = read_rows([source], CRITEO_SCHEMA)

    for slot, texts in enumerate(batch.texts):
        canonical = pa.array([canonical_text(text) for text in texts.to_pylist()])
        expected = rows_of_texts(canonical, slot=slot, num_rows=50)
        assert all_rows(dataset).ids[:, slot].tolist() == expected.tolist()
    assert dataset.features.slot_rows == (50,) * 26
    assert dataset.features.slot_names == CRITEO_SCHEMA.categorical_columns


def test_a_number_that_leaves_float32_by_the_transform_of_an_earlier_model_is_refused(tmp_path):
    labels = {"click": [0, 1, 0], "age": [1.0, 1e39, 2.0], "site": ["a", "b", "a"]}
    pq.write_table(pa.table(labels), tmp_path / "rows.parquet")
    schema = DataSchema(
        name="r", label_column="click", numeric_columns=("age",), categorical_columns=("site",)
    )
    earlier = NumericTransform(is_count=(False,), means=(1.0,), standard_deviations=(2.0,))

    def dense(transform):
        dataset = preparation.prepare_dataset(
            tmp_path / "rows.parquet",
            schema=schema,
            numeric_transform=transform,
            eval_fraction=0.0,
            out_dir=tmp_path / "out",
        )
        return all_rows(dataset).dense

    with pytest.raises(
        DataError, match=r"column age must hold numbers that stay in 32-bit range .*got 1e\+39"
    ):
        dense(earlier)
    assert np.isfinite(dense(None)).all()


def test_numbers_are_standardised_by_the_training_rows_alone(tmp_path):
    lines = ["\t".join(criteo_fields(number, I2=str(number), I5="")) for number in range(80)]
    lines += ["\t".join(criteo_fields(number, I2="1000", I5="")) for number in range(20)]
    dataset = prepare(write_lines(tmp_path / "rows.tsv", lines), tmp_path / "out")

    train = np.log1p(np.arange(80))
    np.testing.assert_allclose(
        all_rows(dataset).dense[:80, 1], (train - train.mean()) / train.std(), atol=1e-5
    )
    np.testing.assert_allclose(
        all_rows(dataset).dense[80:, 1], (np.log1p(1e3) - train.mean()) / train.std(), rtol=1e-5
    )
    assert (all_rows(dataset).dense[:, 4] == 0).all()  # missing everywhere


def test_the_manifest_transforms_a_request_like_a_training_row(source, tmp_path):
    dataset = prepare(source, tmp_path / "out")
    (batch,) = read_rows([source], CRITEO_SCHEMA)

    np.testing.assert_array_equal(
        dataset.manifest.numeric_transform.apply(batch.numbers), all_rows(dataset).dense
    )


def test_the_manifest_counts_rows_and_the_clicks_to_train_on(source, tmp_path):
    manifest = prepare(source, tmp_path / "out").manifest

    assert (manifest.num_sampled_rows, manifest.num_sampled_clicks) == (82, 28)  # multiples of 3 below 82
    assert manifest.train_click_rate == pytest.approx(28 / 82)
    assert [file.path for file in manifest.sources] == [str(source)]


def test_files_are_prepared_in_many_blocks_as_in_one(tmp_path):
    lines = criteo_lines(3_000)
    whole = prepare(write_lines(tmp_path / "rows.tsv", lines), tmp_path / "whole")
    parts = [write_lines(tmp_path / f"part-{i}.tsv.gz", lines[i : i + 700]) for i in range(0, 3_000, 700)]
    pieces = prepare(parts, tmp_path / "pieces")

    np.testing.assert_array_equal(all_rows(whole).ids, all_rows(pieces).ids)
    np.testing.assert_array_equal(all_rows(whole).dense, all_rows(pieces).dense)


def test_text_and_parquet_of_the_same_rows_are_prepared_alike(source, tmp_path):
    text = prepare(source, tmp_path / "text")
    parquet = prepare(write_parquet(tmp_path / "rows.parquet", 103, rows_per_group=20), tmp_path / "parquet")

    for name in ("dense", "ids", "labels"):
        np.testing.assert_array_equal(getattr(all_rows(text), name), getattr(all_rows(parquet), name))
    assert text.manifest.numeric_transform.is_count == parquet.manifest.numeric_transform.is_count
    assert text.manifest.numeric_transform.means == pytest.approx(parquet.manifest.numeric_transform.means)


def test_a_long_text_becomes_row_groups_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(text_conversion, "ROWS_PER_GROUP", 1_000)
    source = write_lines(tmp_path / "rows.tsv", criteo_lines(3_500))

    dataset = prepare(source, tmp_path / "out")

    assert np.load(tmp_path / "out" / "row_groups.npy").tolist() == [0, 1_000, 2_000, 3_000, 3_500]
    assert dataset.targets(0, 3_500)[0].tolist() == [int(number % 3 == 0) for number in range(3_500)]


def test_a_column_keeps_the_rows_that_its_schema_gives_it(tmp_path):
    source = write_parquet(tmp_path / "rows.parquet", 100)
    schema = replace(CRITEO_SCHEMA, table_rows={"C3": 77})

    by_values = prepare(source, tmp_path / "out", schema=schema, buckets_per_slot=None).features
    by_number = prepare(source, tmp_path / "out", schema=schema, buckets_per_slot=50)

    assert by_values.slot_rows[2] == by_number.features.slot_rows[2] == 77
    assert set(by_number.features.slot_rows) == {50, 77}
    assert by_number.batch(np.arange(100)).ids[:, 2].max() in range(50, 77)


def test_of_many_rows_runs_spread_over_the_training_rows_fit_the_transform(tmp_path, monkeypatch):
    """Of 80 training rows, ten of every twenty are read."""
    monkeypatch.setattr(training_rows, "SAMPLED_ROWS", 40)
    monkeypatch.setattr(training_rows, "SAMPLED_RUNS", 4)
    source = write_parquet(tmp_path / "rows.parquet", 100, rows_per_group=7)

    manifest = prepare(source, tmp_path / "out").manifest

    sampled = np.concatenate([np.arange(first, first + 10) for first in (0, 20, 40, 60)])
    numbers = np.log1p(sampled * 2 % 97)  # of I2
    assert (manifest.num_sampled_rows, manifest.num_sampled_clicks) == (40, int((sampled % 3 == 0).sum()))
    assert manifest.numeric_transform.means[1] == pytest.approx(numbers.mean())
    assert manifest.numeric_transform.standard_deviations[1] == pytest.approx(numbers.std())


def test_a_row_group_that_memory_does_not_hold_is_refused_with_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "BUFFER_BYTES", 50 * 157)
    source = write_parquet(tmp_path / "rows.parquet", 100, rows_per_group=51)

    with pytest.raises(
        DataError, match=r"rows.parquet: a row group must fit into .* one holds 51 rows of 157"
    ):
        prepare(source, tmp_path / "out")


def test_empty_row_groups_and_files_of_different_sizes_are_read_like_one_file(tmp_path):
    whole = prepare(write_parquet(tmp_path / "whole.parquet", 300), tmp_path / "whole")
    bounds = [0, 7, 7, 180, 300]
    table = pq.read_table(tmp_path / "whole.parquet")
    (tmp_path / "parts").mkdir()
    for number, (first, stop) in enumerate([(0, 2), (2, 4)]):
        with pq.ParquetWriter(tmp_path / "parts" / f"{number}.parquet", table.schema) as writer:
            for start, end in pairwise(bounds[first : stop + 1]):
                writer.write_table(table.slice(start, end - start))

    parts = prepare(tmp_path / "parts", tmp_path / "out")

    assert np.load(tmp_path / "out" / "row_groups.npy").tolist() == bounds
    for name in ("dense", "ids", "labels"):
        np.testing.assert_allclose(
            getattr(all_rows(parts), name), getattr(all_rows(whole), name), rtol=1e-5, atol=1e-6
        )
    rows = [parts.batch_rows(0, index, batch_size=16, seed=1) for index in range(parts.num_batches(16))]
    for each in rows:
        np.testing.assert_array_equal(parts.batch(each).ids.numpy(), all_rows(parts).ids[each])


def test_a_parquet_file_without_rows_beside_others_is_no_error(tmp_path):
    """As Spark writes for a partition that nothing fell into."""
    path = write_parquet(tmp_path / "in" / "1.parquet", 100)
    for name in ("0", "2"):
        pq.write_table(pq.read_table(path).slice(0, 0), tmp_path / "in" / f"{name}.parquet")

    dataset = prepare(tmp_path / "in", tmp_path / "out")

    assert (dataset.manifest.num_rows, len(dataset.manifest.sources)) == (100, 3)
    assert all_rows(dataset).labels.tolist() == [int(number % 3 == 0) for number in range(100)]
    with pytest.raises(DataError, match=r"0.parquet: must hold at least one row of criteo data, got none"):
        prepare([path], tmp_path / "night", eval_source=[tmp_path / "in" / "0.parquet"])


@pytest.mark.parametrize(
    ("column", "kind", "problem"),
    [
        (
            "I3",
            None,
            r"second.parquet: must have the columns I3; has label, .* or leave them out of the schema",
        ),
        ("I3", pa.list_(pa.int64()), r"second.parquet: column I3 holds a list<\w+: int64> in each row"),
    ],
)
def test_files_of_one_source_whose_columns_differ_are_reported_apart(tmp_path, column, kind, problem):
    write_parquet(tmp_path / "in" / "first.parquet", 50)
    table = pq.read_table(tmp_path / "in" / "first.parquet").drop_columns([column])
    if kind is not None:
        table = table.append_column(column, pa.nulls(50, kind))
    pq.write_table(table, tmp_path / "in" / "second.parquet")

    with pytest.raises(DataError, match=problem):
        prepare(tmp_path / "in", tmp_path / "out")


UTC_TIMES = [datetime(2026, 11, day, 12, 30, tzinfo=UTC) for day in (1, 2, 3, 4)]
NAIVE_TIMES = [time.replace(tzinfo=None) for time in UTC_TIMES]
DAYS = [time.date() for time in UTC_TIMES]
TEXTS = ["a", "b", "\u00fc", None]
WHOLE = [5, 10**12, -3, None]
LISTS = [["a", "b"], [], None, ["a"]]

SAME_VALUES = {
    "texts": [
        pa.array(TEXTS, kind)
        for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary())
    ]
    + [pa.array(TEXTS).dictionary_encode(), pa.array(TEXTS, pa.large_string()).dictionary_encode()],
    "whole numbers": [
        pa.array(WHOLE),
        pa.array(WHOLE, pa.float64()),
        pa.array(WHOLE).cast(pa.decimal128(38, 4)),
        pa.array(["5", "1e12", "-3.0", ""]),
        pa.array([5.0, 1e12, -3.0, math.nan]),
    ],
    "times": [
        *(pa.array(NAIVE_TIMES, pa.timestamp(unit)) for unit in ("s", "ms", "us", "ns")),
        *(pa.array(UTC_TIMES, pa.timestamp("us", zone)) for zone in ("UTC", "Europe/Berlin", "+05:30")),
        pa.array([str(time) for time in NAIVE_TIMES]),
    ],
    "days": [
        *(pa.array(DAYS).cast(kind) for kind in (pa.date32(), pa.date64(), pa.timestamp("us"))),
        pa.array(map(str, DAYS)),
    ],
    "truth": [
        pa.array([True, False, None, True]),
        pa.array(["true", "False", None, "1"]),
        pa.array([1, 0, None, 1]),
    ],
    "no value": [pa.nulls(4), pa.nulls(4, pa.string()), pa.array([""] * 4), pa.array([math.nan] * 4)],
    "lists": [
        pa.array(LISTS),
        pa.array(LISTS, pa.large_list(pa.large_string())),
        pa.array(LISTS, pa.list_(pa.string_view())),
        pa.array(LISTS, pa.list_(pa.binary())),
        pa.array(["a|b", "", None, "a"]),
    ],
    "lists without value": [
        pa.nulls(4),
        pa.array([[], None, [], []]),
        pa.array([None] * 4, pa.list_(pa.string())),
    ],
}


@pytest.mark.parametrize(
    ("kind", "text_rule"),
    [
        *((kind, TEXT_RULE) for kind in SAME_VALUES),
        *((kind, FIRST_TEXT_RULE) for kind in ("texts", "no value", "lists", "lists without value")),
    ],
)
def test_the_same_values_of_all_types_of_files_are_one_category(tmp_path, kind, text_rule):
    schema = DataSchema(name="clicks", label_column="click", categorical_columns=("site",))
    if "lists" in kind:
        schema = replace(schema, categorical_columns=(), multi_hot_columns=(MultiHotColumn(name="site"),))
    columns = SAME_VALUES[kind]
    if text_rule == FIRST_TEXT_RULE:
        columns = [each for each in columns if not pa.types.is_floating(each.type)]
    for number, column in enumerate(columns):
        table = pa.table({"click": [0, 1, 0, 1], "site": column})
        pq.write_table(table, tmp_path / f"part-{number}.parquet")

    dataset = prepare(tmp_path / "*.parquet", tmp_path / "out", schema=schema, text_rule=text_rule)

    ids = np.split(all_rows(dataset).ids, len(columns))
    assert all(each.tolist() == ids[0].tolist() for each in ids)


@pytest.mark.parametrize(
    "kind", [pa.int8(), pa.int64(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_whole_numbers_and_their_texts_may_stand_in_one_column(tmp_path, kind):
    """5 is hashed as "5", whatever type it is stored in."""
    schema = DataSchema(name="clicks", label_column="click", categorical_columns=("site",))
    numbers = [1, 2, 5, 5]
    for name, column in (
        ("first", pa.array(map(str, numbers))),
        (
            "second",
            pa.array(numbers).cast(kind)
            if pa.types.is_integer(kind)
            else pa.array(map(str, numbers)).cast(kind),
        ),
    ):
        pq.write_table(pa.table({"click": [0, 1, 0, 1], "site": column}), tmp_path / f"{name}.parquet")

    ids = all_rows(prepare(tmp_path / "*.parquet", tmp_path / "out", schema=schema)).ids[:, 0]

    assert ids[:4].tolist() == ids[4:].tolist()
