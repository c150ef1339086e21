import logging
import math
import multiprocessing
import os
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data import preparation, training_rows
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import FIRST_TEXT_RULE, TEXT_RULE
from heterps_core.data.hashing import rows_of_texts
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.reading.canonical_text import canonical_text
from heterps_core.data.reading.readers import read_rows
from heterps_core.data.schema import CRITEO_SCHEMA, DataSchema, MultiHotColumn
from heterps_core.errors import ConfigurationError, DataError
from tests.heterps_core.data.synthetic_rows import (
    all_rows,
    criteo_fields,
    criteo_lines,
    prepare,
    write_lines,
    write_parquet,
)
from tests.small_disk import CAN_MOUNT, mounted


@pytest.fixture
def source(tmp_path):
    return write_lines(tmp_path / "rows.tsv", criteo_lines(103))


def test_rows_stay_in_file_order_and_the_latest_are_held_out(source, tmp_path):
    dataset = prepare(source, tmp_path / "out")

    assert (dataset.num_train_rows, dataset.num_eval_rows) == (82, 21)
    assert all_rows(dataset).labels.tolist() == [int(number % 3 == 0) for number in range(103)]
    assert dataset.eval_labels.tolist() == all_rows(dataset).labels.tolist()[82:]


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
    monkeypatch.setattr(preparation, "ROWS_PER_GROUP", 1_000)
    source = write_lines(tmp_path / "rows.tsv", criteo_lines(3_500))

    dataset = prepare(source, tmp_path / "out")

    assert np.load(tmp_path / "out" / "row_groups.npy").tolist() == [0, 1_000, 2_000, 3_000, 3_500]
    assert dataset.labels(0, 3_500).tolist() == [int(number % 3 == 0) for number in range(3_500)]


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
        (
            "C3",
            pa.float64(),
            r"second.parquet: column C3 must be written as in .* holds double where .*first.par",
        ),
        (
            "C3",
            pa.date32(),
            r"second.parquet: column C3 .* holds date32.* where .* leave C3 out of the schema",
        ),
    ],
)
def test_files_of_one_source_whose_columns_differ_are_told_apart(tmp_path, column, kind, problem):
    """Categories by their types only where a model keeps the first rule for texts."""
    write_parquet(tmp_path / "in" / "first.parquet", 50)
    table = pq.read_table(tmp_path / "in" / "first.parquet").drop_columns([column])
    if kind is not None:
        table = table.append_column(column, pa.nulls(50, kind))
    pq.write_table(table, tmp_path / "in" / "second.parquet")

    with pytest.raises(DataError, match=problem):
        prepare(tmp_path / "in", tmp_path / "out", text_rule=FIRST_TEXT_RULE)


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


# ---- reuse and replacement


def inode_of(dataset):
    return (dataset.directory / "rows-00000.parquet").stat().st_ino


def test_the_same_source_is_reused(source, tmp_path):
    first = prepare(source, tmp_path / "out")
    manifest_time_ns = (tmp_path / "out" / "manifest.json").stat().st_mtime_ns

    second = prepare(source, tmp_path / "out")

    assert inode_of(second) == inode_of(first)
    assert (tmp_path / "out" / "manifest.json").stat().st_mtime_ns == manifest_time_ns


def test_a_changed_source_is_prepared_anew_and_old_readers_keep_the_old_rows(source, tmp_path):
    old = prepare(source, tmp_path / "out")
    write_lines(source, criteo_lines(60))

    new = prepare(source, tmp_path / "out")

    assert len(all_rows(new).labels) == 60
    assert all_rows(old).labels.tolist() == [int(number % 3 == 0) for number in range(103)]


def test_a_source_rewritten_with_the_same_size_and_time_is_noticed(source, tmp_path):
    first = prepare(source, tmp_path / "out")
    times_ns = (source.stat().st_atime_ns, source.stat().st_mtime_ns)
    source.write_bytes(b"0" + source.read_bytes()[1:])
    os.utime(source, ns=times_ns)

    assert (
        prepare(source, tmp_path / "out").manifest.num_sampled_clicks == first.manifest.num_sampled_clicks - 1
    )


def prepare_and_tell(source, out_dir, buckets_per_slot, together, answers):
    """Prepare in this process once all are there; tell what was logged, and the content that was returned."""
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage().split()[0])
    logging.getLogger("heterps_core.data.preparation").addHandler(handler)
    logging.getLogger("heterps_core.data.preparation").setLevel(logging.INFO)
    together.wait(60)
    dataset = prepare(source, out_dir, buckets_per_slot=buckets_per_slot)
    answers.put(
        (
            buckets_per_slot,
            dataset.features.slot_rows[0],
            logged,
            all_rows(dataset).ids.sum(),
            len(all_rows(dataset).labels),
        )
    )


def prepare_at_the_same_time(source, out_dir, sizes):
    """Prepare in one folder from as many processes as there are table sizes; returns what they tell."""
    context = multiprocessing.get_context("spawn")
    together, answers = context.Barrier(len(sizes)), context.Queue()
    processes = [
        context.Process(target=prepare_and_tell, args=(source, out_dir, size, together, answers))
        for size in sizes
    ]
    for process in processes:
        process.start()
    told = [answers.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    return told


def test_of_two_processes_that_prepare_the_same_folder_one_prepares_and_the_other_waits_for_it(tmp_path):
    source = write_lines(tmp_path / "rows.tsv", criteo_lines(30_000))
    alone = prepare(source, tmp_path / "alone")

    told = prepare_at_the_same_time(source, tmp_path / "both", [50, 50])

    assert sorted(logged for _, _, logged, _, _ in told) == [["prepared"], ["reusing"]]
    assert {(ids, rows) for *_, ids, rows in told} == {(all_rows(alone).ids.sum(), 30_000)}
    both = PreparedDataset.open(tmp_path / "both")
    np.testing.assert_array_equal(all_rows(both).ids, all_rows(alone).ids)
    np.testing.assert_array_equal(all_rows(both).dense, all_rows(alone).dense)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "both", "rows.tsv"]


def test_two_processes_that_prepare_one_folder_otherwise_each_get_their_own_rows(tmp_path):
    source = write_lines(tmp_path / "rows.tsv", criteo_lines(30_000))

    told = prepare_at_the_same_time(source, tmp_path / "both", [50, 51])

    assert {(asked, got) for asked, got, *_ in told} == {(50, 50), (51, 51)}
    assert [logged for _, _, logged, _, _ in told] == [["prepared"], ["prepared"]]


def test_who_replaces_the_rows_as_soon_as_it_may_does_not_change_what_the_first_gets(
    source, tmp_path, monkeypatch
):
    exclusive = preparation._exclusive

    @contextmanager
    def with_another_waiting(directory):
        with exclusive(directory):
            yield
        monkeypatch.setattr(preparation, "_exclusive", exclusive)
        prepare(source, tmp_path / "out", buckets_per_slot=51)

    monkeypatch.setattr(preparation, "_exclusive", with_another_waiting)

    dataset = prepare(source, tmp_path / "out")

    assert set(dataset.features.slot_rows) == {50}
    assert all_rows(dataset).ids.max() < 50


@pytest.mark.parametrize("changes", [{"buckets_per_slot": 51}, {"eval_fraction": 0.3}])
def test_other_parameters_are_prepared_anew(source, tmp_path, changes):
    first = prepare(source, tmp_path / "out").manifest.fingerprint

    assert prepare(source, tmp_path / "out", **changes).manifest.fingerprint != first


def test_a_bad_source_leaves_the_last_good_dataset_and_nothing_else(source, tmp_path):
    prepare(source, tmp_path / "data" / "out")
    write_lines(source, [*criteo_lines(10), "bad"])

    with pytest.raises(DataError, match="line 11"):
        prepare(source, tmp_path / "data" / "out")

    assert PreparedDataset.open(tmp_path / "data" / "out").manifest.num_rows == 103
    assert [entry.name for entry in (tmp_path / "data").iterdir()] == ["out"]


def test_a_bad_source_leaves_nothing_where_nothing_was(tmp_path):
    source = write_lines(tmp_path / "rows.tsv", ["bad"])

    with pytest.raises(DataError):
        prepare(source, tmp_path / "data" / "out")

    assert list((tmp_path / "data").iterdir()) == []


def test_what_a_killed_preparation_left_is_cleared_away(source, tmp_path):
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "rows-00000.parquet").write_bytes(b"half a file")

    prepare(source, tmp_path / "out")

    assert not partial.exists()


def test_a_folder_with_other_files_is_never_replaced(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")

    with pytest.raises(ConfigurationError, match=r"holds 'thesis.txt'; choose another folder"):
        prepare(source, tmp_path / "out")

    assert (tmp_path / "out" / "thesis.txt").exists()


def test_a_file_in_the_place_of_the_folder_is_an_error(source):
    with pytest.raises(ConfigurationError, match="must be a folder"):
        prepare(source, source)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buckets_per_slot": 1}, r"buckets_per_slot must be in 2..2147483647, got 1"),
        ({"eval_fraction": 1.0}, r"eval_fraction must be in \[0, 1\), got 1.0"),
        ({"eval_fraction": -0.1}, r"eval_fraction must be in \[0, 1\), got -0.1"),
    ],
)
def test_refuses_parameters_out_of_range(source, tmp_path, changes, message):
    with pytest.raises(ConfigurationError, match=message):
        prepare(source, tmp_path / "out", **changes)


def test_one_row_is_too_few_to_hold_any_out(tmp_path):
    source = write_lines(tmp_path / "rows.tsv", criteo_lines(1))

    with pytest.raises(DataError, match="at least 2 rows are needed"):
        prepare(source, tmp_path / "out")

    assert prepare(source, tmp_path / "out", eval_fraction=0.0).num_train_rows == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_a_full_disk_is_an_error_with_its_reason(source, tmp_path, monkeypatch):
    write = preparation._write_parquet

    def write_to_full(source, target, schema):
        target.symlink_to("/dev/full")
        write(source, target, schema)

    monkeypatch.setattr(preparation, "_write_parquet", write_to_full)

    with pytest.raises(DataError, match=r"cannot write the prepared dataset: .*No space left on device"):
        prepare(source, tmp_path / "out")

    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["rows.tsv"]


@pytest.mark.skipif(not CAN_MOUNT, reason="needs root to mount a small file system")
def test_a_disk_that_fills_during_conversion_keeps_the_dataset_that_was_there(tmp_path):
    with mounted(tmp_path / "disk") as disk:
        before = prepare(write_lines(tmp_path / "few.tsv", criteo_lines(103)), disk.path / "out")
        many = write_lines(tmp_path / "many.tsv.gz", criteo_lines(9_000))

        with pytest.raises(
            DataError, match=r"out: cannot write the prepared dataset: .*No space left on device"
        ):
            prepare(many, disk.path / "out")

        assert PreparedDataset.open(disk.path / "out").manifest == before.manifest
        assert [entry.name for entry in disk.path.iterdir()] == ["out"]


def test_a_table_of_categories_alone_has_no_dense_columns(tmp_path):
    schema = DataSchema(name="clicks", label_column="click", categorical_columns=("site",))
    source = write_lines(tmp_path / "rows.csv", ["click,site", "1,a", "0,b", "0,a"])

    dataset = prepare(source, tmp_path / "out", schema=schema)

    assert all_rows(dataset).dense.shape == (3, 0)
    assert dataset.batch(np.array([0, 1])).dense.shape == (2, 0)


def prepare_night(tmp_path, out_dir="out", *, eval_lines=None, **changes):
    day = write_lines(tmp_path / "day.tsv", criteo_lines(30))
    next_day = write_lines(tmp_path / "next.tsv.gz", eval_lines or criteo_lines(50)[30:])
    return prepare([day], tmp_path / out_dir, eval_source=[next_day], **changes)


def test_rows_of_another_source_are_held_out_as_a_whole(tmp_path):
    night = prepare_night(tmp_path)
    both = prepare(write_lines(tmp_path / "both.tsv", criteo_lines(50)), tmp_path / "b", eval_fraction=0.4)

    assert (night.num_train_rows, night.num_eval_rows, night.manifest.eval_fraction) == (30, 20, 0.4)
    np.testing.assert_array_equal(all_rows(night).ids, all_rows(both).ids)
    np.testing.assert_array_equal(all_rows(night).dense, all_rows(both).dense)


def test_a_transform_that_is_given_is_applied_and_kept(tmp_path):
    fitted = prepare_night(tmp_path, "first").manifest.numeric_transform
    other = NumericTransform(is_count=fitted.is_count, means=(1.0,) * 13, standard_deviations=(2.0,) * 13)

    night = prepare_night(tmp_path, "second", numeric_transform=other)

    raw = np.array([float(number * 2 % 97) for number in range(50)])  # of I2
    np.testing.assert_allclose(all_rows(night).dense[:, 1], (np.log1p(raw) - 1.0) / 2.0, rtol=1e-5, atol=1e-6)
    assert night.manifest.numeric_transform == other
    assert PreparedDataset.open(night.directory).manifest.numeric_transform == other


def test_a_night_is_reused_only_for_the_same_transform_and_the_same_next_day(tmp_path):
    first = prepare_night(tmp_path)
    transform = first.manifest.numeric_transform
    fingerprints = [
        first.manifest.fingerprint,
        prepare_night(tmp_path, numeric_transform=transform).manifest.fingerprint,
        prepare_night(tmp_path, eval_lines=criteo_lines(9)).manifest.fingerprint,
        prepare([tmp_path / "day.tsv", tmp_path / "next.tsv.gz"], tmp_path / "out").manifest.fingerprint,
    ]

    assert len(set(fingerprints)) == 4


def test_a_transform_of_other_columns_is_refused(tmp_path):
    other = NumericTransform(is_count=(True,), means=(0.0,), standard_deviations=(1.0,))

    with pytest.raises(ConfigurationError, match="must be of the numeric columns of the criteo data"):
        prepare_night(tmp_path, numeric_transform=other)
