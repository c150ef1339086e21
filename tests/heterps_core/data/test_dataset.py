import json
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.row_groups import RowGroups
from heterps_core.errors import ConfigurationError, DataError
from tests.heterps_core.data.synthetic_rows import all_rows, criteo_lines, prepare, write_lines, write_parquet

NO_CHANGE = NumericTransform(is_count=(True,) * 13, means=(0.0,) * 13, standard_deviations=(1.0,) * 13)


@pytest.fixture
def source(tmp_path):
    return write_lines(tmp_path / "rows.tsv", criteo_lines(103))


def test_an_opened_dataset_equals_the_prepared_one(source, tmp_path):
    prepared = prepare(source, tmp_path / "out")
    opened = PreparedDataset.open(tmp_path / "out")

    assert opened.manifest == prepared.manifest
    for name in ("dense", "ids", "labels"):
        np.testing.assert_array_equal(getattr(all_rows(opened), name), getattr(all_rows(prepared), name))


@pytest.mark.parametrize("content", [None, "", "{}", '{"format_version": 999}', "[]"])
def test_a_folder_without_a_complete_manifest_is_no_dataset(source, tmp_path, content):
    prepare(source, tmp_path / "out")
    manifest = tmp_path / "out" / "manifest.json"
    if content is None:
        manifest.unlink()
    else:
        manifest.write_text(content)

    with pytest.raises(DataError, match=r"no readable manifest.json of format 4; prepare it again"):
        PreparedDataset.open(tmp_path / "out")
    assert prepare(source, tmp_path / "out").num_train_rows == 82


def test_row_groups_that_do_not_fit_the_manifest_are_an_error(source, tmp_path):
    prepare(source, tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_eval_rows": 22}))

    with pytest.raises(DataError, match=r"row_groups.npy: must list the 1 row groups and 104 rows of the"):
        PreparedDataset.open(tmp_path / "out")


def test_a_lost_file_is_an_error(source, tmp_path):
    prepare(source, tmp_path / "out")
    (tmp_path / "out" / "rows-00000.parquet").unlink()

    with pytest.raises(DataError, match=r"rows-00000.parquet: cannot be read: .*No such file"):
        PreparedDataset.open(tmp_path / "out")


def test_a_file_that_was_replaced_by_one_of_other_rows_is_an_error(tmp_path):
    source = write_parquet(tmp_path / "rows.parquet", 103)
    prepare(source, tmp_path / "out")
    write_parquet(source, 104)

    with pytest.raises(DataError, match=r"prepared from, 103 in 1 row groups, but has 104 in 1; prepare the"):
        PreparedDataset.open(tmp_path / "out")


def test_an_epoch_visits_each_row_once_but_for_the_tail(source, tmp_path):
    dataset = prepare(source, tmp_path / "out")

    batches = [dataset.batch_rows(0, i, batch_size=20, seed=1) for i in range(dataset.num_batches(20))]

    visited = np.concatenate(batches)
    assert [len(batch) for batch in batches] == [20] * 4
    assert len(set(visited.tolist())) == 80
    assert set(visited.tolist()) <= set(range(82))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_workers_slices_together_are_the_global_batch(source, tmp_path, num_workers):
    dataset = prepare(source, tmp_path / "out")
    cuts = [30 * i // num_workers for i in range(num_workers + 1)]

    slices = [
        PreparedDataset.open(dataset.directory).batch_rows(
            2, 1, batch_size=30, seed=4, positions=np.arange(first, stop)
        )
        for first, stop in pairwise(cuts)
    ]

    assert np.concatenate(slices).tolist() == dataset.batch_rows(2, 1, batch_size=30, seed=4).tolist()


def test_another_process_computes_the_same_batch(source, tmp_path):
    dataset = prepare(source, tmp_path / "out")
    program = (
        "import sys; from heterps_core.data.dataset import PreparedDataset; "
        "print(PreparedDataset.open(sys.argv[1]).batch_rows(3, 1, batch_size=16, seed=9).tolist())"
    )

    output = subprocess.run(
        [sys.executable, "-c", program, str(dataset.directory)], capture_output=True, text=True, check=True
    )

    assert json.loads(output.stdout) == dataset.batch_rows(3, 1, batch_size=16, seed=9).tolist()


def test_fewer_rows_than_a_batch_are_repeated_to_fill_it(source, tmp_path):
    dataset = prepare(source, tmp_path / "out")

    rows = dataset.batch_rows(0, 0, batch_size=200, seed=0)

    assert dataset.num_batches(200) == 1
    assert set(np.bincount(rows, minlength=82).tolist()) == {2, 3}  # 200 = 2 * 82 + 36


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_index": 4, "batch_size": 20}, r"batch_index must be in 0..3 for 82 rows .* got 4"),
        ({"batch_index": -1, "batch_size": 20}, "batch_index must be in"),
        ({"batch_index": 0, "batch_size": 0}, "batch_size must be at least 1, got 0"),
        (
            {"batch_index": 0, "batch_size": 20, "positions": np.array([5, 20])},
            r"positions must be in 0\.\.19, got 5 to 20",
        ),
    ],
)
def test_refuses_batches_and_positions_outside(source, tmp_path, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        prepare(source, tmp_path / "out").batch_rows(0, seed=0, **arguments)


def test_a_batch_holds_the_rows_that_were_asked_for_in_their_order(source, tmp_path):
    dataset = prepare(source, tmp_path / "out")
    rows = np.array([81, 3, 3, 102])

    batch = dataset.batch(rows)

    np.testing.assert_array_equal(batch.ids.numpy(), all_rows(dataset).ids[rows])
    np.testing.assert_array_equal(batch.dense.numpy(), all_rows(dataset).dense[rows])
    assert batch.labels.tolist() == [1.0, 1.0, 1.0, 1.0]
    labels = dataset.target_batch(rows)
    assert (labels.labels.tolist(), labels.dense.shape, labels.ids.shape) == ([1.0] * 4, (4, 0), (4, 0))


@pytest.fixture(scope="module")
def many_groups(tmp_path_factory):
    """1,000 rows in two Parquet files of 60 row groups, of which the last 200 are held out."""
    folder = tmp_path_factory.mktemp("groups")
    for name, first, stop in (("a", 0, 600), ("b", 600, 1_000)):
        write_parquet(folder / "in" / f"{name}.parquet", stop, first=first, rows_per_group=17)
    return prepare(folder / "in", folder / "out")


def test_parquet_files_are_not_copied(many_groups):
    files = sorted(many_groups.directory.glob("*.parquet"))

    assert len(files) == 2
    assert all(path.is_symlink() for path in files)


def test_batches_over_many_row_groups_hold_the_rows_of_the_order(many_groups):
    """Every batch of two epochs and a jump back, beside the rows read as a whole."""
    whole = all_rows(many_groups)
    places = [(epoch, index) for epoch in (0, 1) for index in range(many_groups.num_batches(64))] + [(0, 2)]
    for epoch, index in places:
        rows = many_groups.batch_rows(epoch, index, batch_size=64, seed=5)

        batch = many_groups.batch(rows)

        np.testing.assert_array_equal(batch.ids.numpy(), whole.ids[rows])
        np.testing.assert_array_equal(batch.dense.numpy(), whole.dense[rows])
        np.testing.assert_array_equal(batch.labels.numpy(), whole.labels[rows])
        np.testing.assert_array_equal(many_groups.target_batch(rows).labels.numpy(), whole.labels[rows])


def test_parts_begin_and_end_within_row_groups(many_groups):
    whole, parts = all_rows(many_groups), list(many_groups.parts(20, 610))

    np.testing.assert_array_equal(np.concatenate([part.ids for part in parts]), whole.ids[20:610])
    np.testing.assert_array_equal(many_groups.targets(20, 610)[0], whole.labels[20:610])
    assert list(many_groups.parts(30, 30)) == []


def test_rows_of_a_part_hold_no_others_of_their_row_group_in_memory(many_groups: PreparedDataset) -> None:
    (part,) = many_groups.parts(3, 5)

    for rows in (part.dense, part.ids):
        owner = rows if rows.base is None else rows.base
        assert owner.nbytes == rows.nbytes


@pytest.mark.parametrize("batch_size", [8, 64, 200, 500])
def test_held_out_batches_hold_each_held_out_row_once(many_groups, batch_size):
    num_batches = -(-200 // batch_size)

    batches = [many_groups.held_out_rows(index, batch_size=batch_size) for index in range(num_batches + 1)]

    assert sorted(np.concatenate(batches).tolist()) == list(range(800, 1_000))
    assert [len(batch) for batch in batches] == [
        min(batch_size, 200 - index * batch_size) for index in range(num_batches)
    ] + [0]


def test_a_row_group_that_is_damaged_is_named(tmp_path):
    source = write_parquet(tmp_path / "rows.parquet", 500, rows_per_group=100)
    dataset = prepare(source, tmp_path / "out", numeric_transform=NO_CHANGE)
    column = pq.ParquetFile(source).metadata.row_group(3).column(30)
    with source.open("r+b") as file:
        file.seek(column.dictionary_page_offset or column.data_page_offset)
        file.write(bytes(column.total_compressed_size))

    with pytest.raises(DataError, match=r"rows.parquet: row group 3 of 5 cannot be read as Parquet"):
        dataset.batch(np.array([350]))
    assert dataset.batch(np.array([250])).num_rows == 1


def test_of_an_epoch_the_row_groups_after_those_of_the_first_batch_are_decoded(tmp_path, monkeypatch):
    source = write_parquet(tmp_path / "rows.parquet", 480, rows_per_group=10)
    dataset = prepare(source, tmp_path / "out", eval_fraction=0.0)
    read, groups = RowGroups.read, []
    monkeypatch.setattr(RowGroups, "read", lambda self, group: groups.append(group) or read(self, group))

    for index in range(dataset.num_batches(12)):
        dataset.batch(dataset.batch_rows(0, index, batch_size=12, seed=3))
        if index == 0:
            num_first = len(groups)

    # 12 lanes of 48 row groups.
    assert (num_first, len(groups)) == (12, 48)
    assert dataset.decoded_share(480, batch_size=12) == (48 - 12) / 48
    # A night of ten times as many rows has ten times as many row groups, and with large batches all are held.
    assert dataset.decoded_share(4_800, batch_size=12) == (480 - 12) / 480
    assert dataset.decoded_share(480, batch_size=64) == 0
