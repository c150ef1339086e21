import pytest

from tests.benchmarks import measured_clusters
from tests.benchmarks.measured_clusters import (
    DrawnCluster,
    draw_clusters,
    make_dataset,
    measured_in_namespace,
)
from tests.network_hosts import why_no_hosts

SMALLEST = DrawnCluster(
    model="ctrdnn(hidden_widths=8, embedding_dim=4)",
    batch_size=256,
    last_layers=(0, 3),
    replicas=(2, 2),
    mbit_per_s=(8.0, 4.0),
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("clicks"), num_clicks=2_000)


def test_every_cluster_has_two_to_twelve_hosts_and_the_seed_decides(dataset):
    clusters = draw_clusters(dataset, num_clusters=8, seed=3)

    assert clusters == draw_clusters(dataset, num_clusters=8, seed=3)
    assert clusters != draw_clusters(dataset, num_clusters=8, seed=4)
    assert {cluster.model for cluster in clusters} == set(measured_clusters.MODELS)
    for cluster in clusters:
        least, most = (2, 4) if cluster.is_by_processor else (4, 12)
        assert least <= sum(cluster.replicas) <= most
        assert len(cluster.stages) == len(cluster.mbit_per_s) >= 2
        assert cluster.is_by_processor == (
            set(cluster.mbit_per_s) == {measured_clusters.UNLIMITED_MBIT_PER_S}
        )
        assert list(cluster.last_layers) == sorted(set(cluster.last_layers))


def test_a_machine_without_the_tools_is_reported_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(SystemExit, match=r"^hosts with addresses of their own need .+$"):
        measured_clusters.run()


@pytest.mark.weekly
@pytest.mark.root
def test_a_link_sets_the_pace_of_the_smallest_cluster(dataset, tmp_path):
    if (reason := why_no_hosts()) is not None:
        pytest.skip(reason)

    measured = measured_in_namespace(SMALLEST, dataset, tmp_path / "measured")

    # 26 slots of 4 floats and 13 dense features cross to the second stage, in halves at 0.5 MB/s each.
    limit_samples_per_s = 2 * 0.5e6 / ((26 * 4 + 13) * 4)
    assert 0.1 * limit_samples_per_s < measured.samples_per_s < 1.02 * limit_samples_per_s
    # No link carries more than its rate.
    assert max(max(shares) for shares in measured.link_shares) < 1.02
