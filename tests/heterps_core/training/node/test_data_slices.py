"""What a node copies of a data set: all rows that its replicas ever read, and few others."""

from dataclasses import replace

import numpy as np
import pytest

from heterps_core.cluster import Cluster, Node
from heterps_core.data.array_files import ARRAY_NAMES
from heterps_core.data.dataset import PreparedDataset
from heterps_core.hardware import Market
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import TrainingConfig
from heterps_core.training.node import data_slices
from heterps_core.training.node.data_slices import download_slices, held_out_regions, training_regions
from heterps_core.training.pipeline.stage_exchange import replica_slice
from heterps_core.training.storage.run_directory import DATA, RunDirectory
from tests.heterps_core.training.node_processes import make_job, prepare_clicks


def make_config(**changes):
    values = {"batch_size": 64, "num_microbatches": 2, "num_epochs": 2, "seed": 3}
    return TrainingConfig(**{**values, **changes})


def make_cluster(*workers_per_node, stages):
    nodes = tuple(
        Node(
            node_id=f"node{index}",
            address="127.0.0.1",
            device_type="cpu",
            instance_type="local",
            market=Market.SPOT,
            stage=stage,
            num_workers=workers,
            price_usd_per_hour=0.1,
            provider_instance_id=str(index),
        )
        for index, (workers, stage) in enumerate(zip(workers_per_node, stages, strict=True))
    )
    return Cluster(
        run_id="r",
        provider="aws",
        nodes=nodes,
        rendezvous="127.0.0.1:1",
        created_at="2026-11-21T00:00:00+00:00",
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return PreparedDataset.open(prepare_clicks(tmp_path_factory.mktemp("clicks")))


@pytest.fixture
def no_gaps(monkeypatch):
    """Regions are kept apart, as they are in files of millions of rows."""
    monkeypatch.setattr(data_slices, "LEAST_GAP_ROWS", 1)


def rows_read(dataset, config, num_replicas, replica):
    """Walk over all batches as a worker does."""
    rows = set()
    for epoch in range(config.num_epochs):
        for batch in range(dataset.num_batches(config.batch_size)):
            for index in range(config.num_microbatches):
                part = replica_slice(config.batch_size, config.num_microbatches, index)
                mine = replica_slice(part.num_rows, num_replicas, replica)
                rows |= set(
                    dataset.batch_rows(
                        epoch,
                        batch,
                        batch_size=config.batch_size,
                        seed=config.seed,
                        lo=part.first + mine.first,
                        hi=part.first + mine.stop,
                    ).tolist()
                )
    return rows


def covered(regions):
    return {row for first, stop in regions.tolist() for row in range(first, stop)}


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("changes", [{}, {"num_microbatches": 4}, {"batch_size": 512, "num_epochs": 1}])
@pytest.mark.usefixtures("no_gaps")
def test_every_row_that_a_replica_reads_is_covered(dataset, num_replicas, changes):
    config = make_config(**changes)
    for replica in range(num_replicas):
        regions = training_regions(
            dataset.num_train_rows, config, num_replicas=num_replicas, replicas=[replica]
        )
        assert rows_read(dataset, config, num_replicas, replica) <= covered(regions)


def test_a_batch_larger_than_the_data_needs_all_of_it(dataset):
    config = make_config(batch_size=2048)
    regions = training_regions(dataset.num_train_rows, config, num_replicas=2, replicas=[1])

    assert regions.tolist() == [[0, dataset.num_train_rows]]


@pytest.mark.usefixtures("no_gaps")
def test_replicas_share_a_large_file_among_them():
    """With batches of 4,096 of a million rows the parts of four replicas overlap by a few percent only."""
    config = make_config(batch_size=4096, num_microbatches=1, num_epochs=1)
    shares = [
        len(covered(training_regions(1_000_000, config, num_replicas=4, replicas=[replica]))) / 1_000_000
        for replica in range(4)
    ]

    assert all(0.25 <= share < 0.30 for share in shares)
    both = covered(training_regions(1_000_000, config, num_replicas=4, replicas=[1, 2]))
    assert 0.50 <= len(both) / 1_000_000 < 0.55


@pytest.mark.usefixtures("no_gaps")
def test_held_out_rows_are_those_of_the_replicas_slices_of_each_batch():
    config = make_config(batch_size=64, num_microbatches=2)

    regions = held_out_regions(100, config, num_replicas=2, replicas=[0])

    # By hand: a batch of 64 in micro-batches of 32, then one of 36 in micro-batches of 18; the first half of each.
    assert covered(regions) == {*range(16), *range(32, 48), *range(64, 73), *range(82, 91)}


@pytest.mark.usefixtures("no_gaps")
@pytest.mark.parametrize(("node_index", "stage", "replica"), [(0, 0, 0), (1, 0, 1), (2, 1, 0)])
def test_a_node_reads_its_own_copy_as_if_it_were_whole(dataset, tmp_path, node_index, stage, replica):
    job = make_job(dataset.directory, (2, 1))
    run = RunDirectory(str(tmp_path / "run"))
    run.upload_folder(dataset.directory, DATA)
    cluster = make_cluster(1, 1, 1, stages=[0, 0, 1])

    download_slices(run, job, cluster, cluster.nodes[node_index], tmp_path / "copy")

    copy = PreparedDataset.open(tmp_path / "copy")
    rows = np.array(sorted(rows_read(dataset, job.config, job.replicas_per_stage[stage], replica)))
    needed = {0: {"dense", "ids"}, 1: {"labels"}}[stage]
    for name in ARRAY_NAMES:
        ours, whole = getattr(copy, name), getattr(dataset, name)
        assert ours.shape == whole.shape
        if name in needed:
            assert np.array_equal(ours[rows], whole[rows])
        else:
            assert not np.any(ours)
    if stage == 1:
        assert np.array_equal(copy.eval_labels, dataset.eval_labels)


def held_out_rows_read(dataset, config, num_replicas, replica):
    """Walk over all held-out batches as a worker does."""
    rows = set()
    for start in range(0, dataset.num_eval_rows, config.batch_size):
        num_rows = min(config.batch_size, dataset.num_eval_rows - start)
        for index in range(config.num_microbatches):
            part = replica_slice(num_rows, config.num_microbatches, index)
            mine = replica_slice(part.num_rows, num_replicas, replica)
            first = dataset.num_train_rows + start + part.first
            rows |= set(range(first + mine.first, first + mine.stop))
    return rows


@pytest.mark.usefixtures("no_gaps")
@pytest.mark.parametrize("replica", [0, 1])
def test_each_replica_of_the_last_stage_has_its_features_and_all_held_out_labels(dataset, tmp_path, replica):
    """One of them measures quality with all labels, but predicts its own rows only."""
    job = make_job(dataset.directory, (1, 1))
    job = replace(job, stages=(Stage(0, 2, "cpu", 2),))
    run = RunDirectory(str(tmp_path / "run"))
    run.upload_folder(dataset.directory, DATA)
    cluster = make_cluster(1, 1, stages=[0, 0])

    download_slices(run, job, cluster, cluster.nodes[replica], tmp_path / "copy")

    copy = PreparedDataset.open(tmp_path / "copy")
    trained = np.array(sorted(rows_read(dataset, job.config, 2, replica)))
    predicted = held_out_rows_read(dataset, job.config, 2, replica)
    others = np.array(sorted(held_out_rows_read(dataset, job.config, 2, 1 - replica) - predicted))
    rows = np.concatenate([trained, sorted(predicted)])
    assert np.array_equal(copy.labels[trained], dataset.labels[trained])
    assert np.array_equal(copy.eval_labels, dataset.eval_labels)
    assert np.array_equal(copy.ids[rows], dataset.ids[rows])
    assert np.array_equal(copy.dense[rows], dataset.dense[rows])
    assert not np.any(copy.ids[others])
