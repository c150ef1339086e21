import numpy as np
import pytest

from heterps_core.data.dataset import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic import write_click_stream
from heterps_core.errors import DataError
from infra.workspace import Workspace
from tasks.baseline import design_matrix, measure_baseline
from tasks.data import PreparedClicks, buckets_for_bytes, check_source, prepare_data


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return write_click_stream(tmp_path_factory.mktemp("stream") / "clicks.tsv", num_rows=3_000, seed=1)


@pytest.fixture(scope="module")
def clicks(stream, tmp_path_factory):
    dataset = prepare_dataset(
        str(stream.path),
        schema=CRITEO_SCHEMA,
        buckets_per_slot=256,
        out_dir=tmp_path_factory.mktemp("out") / "d",
    )
    return PreparedClicks(directory=str(dataset.directory), description="clicks", best_reachable=None)


@pytest.mark.parametrize("num_bytes", [0, 1, 10**6, 10**8, 10**12])
def test_buckets_are_a_power_of_two_within_the_limits(num_bytes):
    buckets = buckets_for_bytes(num_bytes)

    assert 1_024 <= buckets <= 131_072
    assert buckets & (buckets - 1) == 0


def test_a_source_is_prepared_in_the_workspace_and_reused(stream, tmp_path):
    workspace = Workspace(root=tmp_path).create()

    first = prepare_data.fn(workspace, data=str(stream.path), schema_file=None)
    written = (tmp_path / "data").stat().st_mtime_ns
    second = prepare_data.fn(workspace, data=str(stream.path), schema_file=None)

    assert first == second
    assert first.open().manifest.num_rows == 3_000
    assert (tmp_path / "data").stat().st_mtime_ns == written


def test_a_missing_source_is_told_without_reading(tmp_path):
    with pytest.raises(DataError, match=r"none\.tsv"):
        check_source(str(tmp_path / "none.tsv"), schema_file=None)


def test_the_design_matrix_is_dense_columns_and_one_hot_ids(clicks):
    dataset = clicks.open()

    matrix = design_matrix(dataset, 10, 14).toarray()

    assert matrix.shape == (4, 13 + 26 * 256)
    np.testing.assert_array_equal(matrix[:, :13], dataset.dense[10:14])
    for row, ids in zip(matrix[:, 13:], dataset.ids[10:14], strict=True):
        np.testing.assert_array_equal(np.flatnonzero(row), ids + 256 * np.arange(26))


def test_the_baseline_learns_the_known_signal(clicks):
    baseline = measure_baseline.fn(clicks)

    assert baseline.quality.num_rows == 600
    assert 0.6 < baseline.quality.auc < 0.82  # the stream's best reachable AUC is about 0.82


def test_there_is_no_baseline_where_all_labels_are_equal(clicks, tmp_path):
    table = tmp_path / "ones.tsv"
    row = "\t".join(["1", *["1"] * 13, *["a"] * 26])
    table.write_text(f"{row}\n" * 10)
    dataset = prepare_dataset(str(table), schema=CRITEO_SCHEMA, buckets_per_slot=8, out_dir=tmp_path / "d")

    only_clicks = PreparedClicks(directory=str(dataset.directory), description="ones", best_reachable=None)
    assert measure_baseline.fn(only_clicks) is None
