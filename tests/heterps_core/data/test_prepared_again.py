"""A prepared data set is reused for the same rows, replaced as a whole, and left as it was by a failure."""

import logging
import multiprocessing
import os
from contextlib import contextmanager

import numpy as np
import pytest

from heterps_core.data import preparation
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.schema import DataSchema
from heterps_core.errors import ConfigurationError, DataError
from tests.heterps_core.data.synthetic_rows import (
    all_rows,
    criteo_lines,
    prepare,
    write_lines,
)
from tests.small_disk import CAN_MOUNT, mounted


@pytest.fixture
def source(tmp_path):
    return write_lines(tmp_path / "rows.tsv", criteo_lines(103))


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
    reported = [answers.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    return reported


@pytest.mark.slow
def test_of_two_processes_that_prepare_the_same_folder_one_prepares_and_the_other_waits_for_it(tmp_path):
    source = write_lines(tmp_path / "rows.tsv", criteo_lines(30_000))
    alone = prepare(source, tmp_path / "alone")

    reported = prepare_at_the_same_time(source, tmp_path / "both", [50, 50])

    assert sorted(logged for _, _, logged, _, _ in reported) == [["prepared"], ["reusing"]]
    assert {(ids, rows) for *_, ids, rows in reported} == {(all_rows(alone).ids.sum(), 30_000)}
    both = PreparedDataset.open(tmp_path / "both")
    np.testing.assert_array_equal(all_rows(both).ids, all_rows(alone).ids)
    np.testing.assert_array_equal(all_rows(both).dense, all_rows(alone).dense)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "both", "rows.tsv"]


@pytest.mark.weekly
def test_two_processes_that_prepare_one_folder_otherwise_each_get_their_own_rows(tmp_path):
    source = write_lines(tmp_path / "rows.tsv", criteo_lines(30_000))

    reported = prepare_at_the_same_time(source, tmp_path / "both", [50, 51])

    assert {(asked, got) for asked, got, *_ in reported} == {(50, 50), (51, 51)}
    assert [logged for _, _, logged, _, _ in reported] == [["prepared"], ["prepared"]]


def test_who_replaces_the_rows_as_soon_as_it_may_does_not_change_what_the_first_gets(
    source, tmp_path, monkeypatch
):
    exclusive = preparation.exclusive

    @contextmanager
    def with_another_waiting(directory):
        with exclusive(directory):
            yield
        monkeypatch.setattr(preparation, "exclusive", exclusive)
        prepare(source, tmp_path / "out", buckets_per_slot=51)

    monkeypatch.setattr(preparation, "exclusive", with_another_waiting)

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
    write = preparation.write_parquet

    def write_to_full(source, target, schema):
        target.symlink_to("/dev/full")
        write(source, target, schema)

    monkeypatch.setattr(preparation, "write_parquet", write_to_full)

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
