import gzip
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sparse
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.reading.readers import list_source_files
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import best_reachable_quality, write_click_stream
from heterps_core.data.synthetic.click_truth import CLICK_RATE
from heterps_core.errors import ConfigurationError, DataError
from tests.heterps_core.data.synthetic_rows import all_rows, held_out_labels

NUM_ROWS = 40_000


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return write_click_stream(tmp_path_factory.mktemp("stream") / "clicks.tsv", num_rows=NUM_ROWS, seed=0)


@pytest.fixture(scope="module")
def dataset(stream):
    out_dir = stream.path.with_name("prepared")
    return prepare_dataset(stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=20_000, out_dir=out_dir)


def test_lines_have_the_published_form(stream):
    lines = stream.path.read_text().splitlines()

    assert len(lines) == NUM_ROWS
    for line in lines[:200]:
        fields = line.split("\t")
        assert len(fields) == 40
        assert fields[0] in {"0", "1"}
        assert all(field == "" or field.isdecimal() for field in fields[1:14])
        assert all(field == "" or (len(field) == 8 and int(field, 16) >= 0) for field in fields[14:])


def test_the_same_seed_gives_the_same_bytes_and_a_longer_stream_begins_with_the_shorter(stream, tmp_path):
    shorter = write_click_stream(tmp_path / "clicks.tsv", num_rows=20_000, seed=0)

    assert stream.path.read_bytes().startswith(shorter.path.read_bytes())
    np.testing.assert_array_equal(shorter.click_probabilities(), stream.click_probabilities()[:20_000])


def test_another_seed_gives_other_rows(stream, tmp_path):
    other = write_click_stream(tmp_path / "clicks.tsv", num_rows=100, seed=1)

    assert not stream.path.read_bytes().startswith(other.path.read_bytes())


def test_a_name_in_gz_is_compressed(stream, tmp_path):
    compressed = write_click_stream(tmp_path / "clicks.tsv.gz", num_rows=1_000, seed=0)

    assert stream.path.read_bytes().startswith(gzip.decompress(compressed.path.read_bytes()))


def test_the_file_of_the_truth_is_no_data_file(stream):
    assert list_source_files(stream.path.parent) == (stream.path,)


def test_labels_follow_the_known_probabilities(stream, dataset):
    probabilities = stream.click_probabilities()
    deviation = np.sqrt((probabilities * (1 - probabilities)).sum())

    assert abs(all_rows(dataset).labels.sum() - probabilities.sum()) < 4 * deviation
    for low, high in [(0.0, 0.2), (0.2, 0.5), (0.5, 1.0)]:
        is_inside = (low <= probabilities) & (probabilities < high)
        assert all_rows(dataset).labels[is_inside].mean() == pytest.approx(
            probabilities[is_inside].mean(), abs=0.02
        )


def test_missing_values_and_popular_values_are_there(dataset):
    shares = np.bincount(all_rows(dataset).ids[:, 9]) / NUM_ROWS  # a slot of 1,000 values, none missing

    assert (all_rows(dataset).ids[:, 21] == 0).mean() == pytest.approx(0.75, abs=0.02)
    assert shares.max() > 0.1
    assert (shares > 0).sum() > 500


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_click_rate_and_best_reachable_auc_are_as_promised(tmp_path, seed):
    stream = write_click_stream(tmp_path / "clicks.tsv", num_rows=20_000, seed=seed)
    probabilities = stream.click_probabilities()
    labels = np.random.default_rng(0).random(len(probabilities)) < probabilities

    assert probabilities.mean() == pytest.approx(CLICK_RATE, abs=0.01)
    assert 0.795 < best_reachable_quality(probabilities, labels.astype(np.uint8)).auc < 0.83


def test_best_reachable_quality_is_that_of_the_true_probabilities(stream, dataset):
    labels, probabilities = all_rows(dataset).labels, stream.click_probabilities()

    quality = best_reachable_quality(probabilities, labels)

    assert quality.auc == pytest.approx(roc_auc_score(labels, probabilities))
    losses = -np.log(np.where(labels == 1, probabilities, 1 - probabilities))
    assert quality.log_loss == pytest.approx(losses.mean())


def test_a_linear_model_learns_part_of_the_signal_and_leaves_room_for_a_deep_one(stream, dataset):
    num_train_rows = dataset.num_train_rows
    encoder = OneHotEncoder(handle_unknown="ignore").fit(all_rows(dataset).ids[:num_train_rows])
    scaler = StandardScaler().fit(all_rows(dataset).dense[:num_train_rows])
    features = sparse.hstack(
        [encoder.transform(all_rows(dataset).ids), scaler.transform(all_rows(dataset).dense)]
    ).tocsr()
    model = LogisticRegression(C=0.1, max_iter=50, tol=1e-2).fit(
        features[:num_train_rows], all_rows(dataset).labels[:num_train_rows]
    )

    auc = roc_auc_score(held_out_labels(dataset), model.decision_function(features[num_train_rows:]))

    best = best_reachable_quality(stream.click_probabilities()[num_train_rows:], held_out_labels(dataset)).auc
    assert 0.70 < auc < best - 0.03


def test_refuses_an_empty_stream(tmp_path):
    with pytest.raises(ConfigurationError, match="num_rows must be at least 1, got 0"):
        write_click_stream(tmp_path / "clicks.tsv", num_rows=0, seed=0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_and_nothing_is_left(tmp_path):
    (tmp_path / "_clicks.tsv.draft").symlink_to("/dev/full")

    with pytest.raises(DataError, match="bytes free there"):
        write_click_stream(tmp_path / "clicks.tsv", num_rows=5_000, seed=0)

    assert list(tmp_path.iterdir()) == []
