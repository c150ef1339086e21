import json
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from heterps_core.data.dataset import PreparedDataset
from heterps_core.errors import ConfigurationError, DataError
from tests.heterps_core.data.made_up_rows import criteo_lines, prepare, write_lines


@pytest.fixture
def source(tmp_path):
    return write_lines(tmp_path / "rows.tsv", criteo_lines(103))


def test_an_opened_dataset_equals_the_prepared_one(source, tmp_path):
    prepared = prepare(source, tmp_path / "out")
    opened = PreparedDataset.open(tmp_path / "out")

    assert opened.manifest == prepared.manifest
    for name in ("dense", "ids", "labels"):
        np.testing.assert_array_equal(getattr(opened, name), getattr(prepared, name))


@pytest.mark.parametrize("content", [None, "", "{}", '{"format_version": 999}', "[]"])
def test_a_folder_without_a_complete_manifest_is_no_dataset(source, tmp_path, content):
    prepare(source, tmp_path / "out")
    manifest = tmp_path / "out" / "manifest.json"
    if content is None:
        manifest.unlink()
    else:
        manifest.write_text(content)

    with pytest.raises(DataError, match=r"no readable manifest.json of format 1; prepare it again"):
        PreparedDataset.open(tmp_path / "out")
    assert prepare(source, tmp_path / "out").num_train_rows == 82


def test_arrays_that_do_not_fit_the_manifest_are_an_error(source, tmp_path):
    prepare(source, tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_eval_rows": 22}))

    with pytest.raises(DataError, match=r"dense.npy: must have the shape \(104, 13\) of the manifest"):
        PreparedDataset.open(tmp_path / "out")


def test_a_lost_array_is_an_error(source, tmp_path):
    prepare(source, tmp_path / "out")
    (tmp_path / "out" / "ids.npy").unlink()

    with pytest.raises(DataError, match=r"ids.npy: cannot be read"):
        PreparedDataset.open(tmp_path / "out")


def test_an_epoch_visits_each_row_once_but_for_the_tail(source, tmp_path):
    dataset = prepare(source, tmp_path / "out")

    batches = [dataset.batch_rows(0, i, batch_size=20, seed=1) for i in range(dataset.num_batches(20))]

    visited = np.concatenate(batches)
    assert [len(batch) for batch in batches] == [20] * 4
    assert len(set(visited.tolist())) == 80
    assert set(visited.tolist()) <= set(range(82))


def test_epochs_and_seeds_have_orders_of_their_own(source, tmp_path):
    dataset = prepare(source, tmp_path / "out")

    orders = {
        tuple(dataset.train_indices(epoch, seed).tolist()) for epoch, seed in [(0, 0), (1, 0), (0, 1), (1, 1)]
    }

    assert len(orders) == 4
    assert all(sorted(order) == list(range(82)) for order in orders)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_workers_slices_together_are_the_global_batch(source, tmp_path, num_workers):
    dataset = prepare(source, tmp_path / "out")
    cuts = [30 * i // num_workers for i in range(num_workers + 1)]

    slices = [
        PreparedDataset.open(dataset.directory).batch_rows(2, 1, batch_size=30, seed=4, lo=lo, hi=hi)
        for lo, hi in pairwise(cuts)
    ]

    assert np.concatenate(slices).tolist() == dataset.batch_rows(2, 1, batch_size=30, seed=4).tolist()
    assert np.concatenate(slices).tolist() == sorted(dataset.train_indices(2, 4)[30:60].tolist())


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
        ({"batch_index": 4, "batch_size": 20}, r"batch_index must be in 0..3 for 82 training rows .* got 4"),
        ({"batch_index": -1, "batch_size": 20}, "batch_index must be in"),
        ({"batch_index": 0, "batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_index": 0, "batch_size": 20, "lo": 5, "hi": 21}, "0 <= lo <= hi <= 20, got 5 and 21"),
        ({"batch_index": 0, "batch_size": 20, "lo": 6, "hi": 5}, "0 <= lo <= hi <= 20, got 6 and 5"),
    ],
)
def test_refuses_batches_and_positions_outside(source, tmp_path, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        prepare(source, tmp_path / "out").batch_rows(0, seed=0, **arguments)


def test_a_training_batch_holds_the_rows_that_were_asked_for(source, tmp_path):
    dataset = prepare(source, tmp_path / "out")
    rows = np.array([81, 3, 3])

    batch = dataset.train_batch(rows)

    np.testing.assert_array_equal(batch.ids.numpy(), dataset.ids[rows])
    np.testing.assert_array_equal(batch.dense.numpy(), dataset.dense[rows])
    assert batch.labels.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("row", [-1, 82])
def test_a_training_batch_never_holds_held_out_rows(source, tmp_path, row):
    dataset = prepare(source, tmp_path / "out")

    with pytest.raises(ConfigurationError, match=r"training rows must be in 0..81"):
        dataset.train_batch(np.array([0, row]))


def test_evaluation_batches_are_the_held_out_rows_in_order(source, tmp_path):
    dataset = prepare(source, tmp_path / "out")

    batches = [dataset.eval_batch(start, start + 8) for start in range(0, dataset.num_eval_rows, 8)]

    assert [batch.num_rows for batch in batches] == [8, 8, 5]
    np.testing.assert_array_equal(np.concatenate([b.ids.numpy() for b in batches]), dataset.ids[82:])
