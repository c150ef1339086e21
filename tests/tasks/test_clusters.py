import logging
from dataclasses import replace

import pytest

from heterps_core.data.manifest import MANIFEST_NAME
from heterps_core.errors import ConfigurationError, ProvisioningError
from heterps_core.training.storage.run_directory import DATA, RunDirectory
from infra.providers import get_provider
from infra.workspace import RUN_STORE_VARIABLE, Workspace
from tasks.clusters import by_network, data_folders
from tests.heterps_core.data.synthetic_rows import prepare, write_parquet
from tests.heterps_core.planning.provisioning.test_node_order import make_cluster, paths_of, traffic_of
from tests.heterps_core.training.storage.test_store_location import KEY, SECRET, WITH_CREDENTIALS


@pytest.mark.parametrize("location", WITH_CREDENTIALS)
def test_a_run_store_with_credentials_is_refused_before_any_machine_is_told(location, monkeypatch, tmp_path):
    monkeypatch.setenv(RUN_STORE_VARIABLE, location)

    with pytest.raises(ConfigurationError, match="must hold no credentials") as refused:
        get_provider("aws").run_location(Workspace(root=tmp_path), "r1")

    assert not [part for part in (KEY, SECRET, "hush") if part in str(refused.value)]


class Asked:
    """A provider that answers where machines stand, or does not."""

    def __init__(self, answer):
        self.answer = answer

    def network_paths(self, cluster):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_the_nodes_of_a_launch_are_ordered_by_where_they_stand(caplog):
    cluster = make_cluster([[1, 1, 1], [1, 1, 1]])
    paths = paths_of(cluster, "abccab")
    caplog.set_level(logging.INFO)

    ordered = by_network(Asked(paths), cluster, traffic_of(cluster))

    assert set(ordered.nodes) == set(cluster.nodes)
    assert all(paths[ordered.node_of(0, i).node_id] == paths[ordered.node_of(1, i).node_id] for i in range(3))
    assert "of 6 nodes change places" in caplog.text


@pytest.mark.parametrize("answer", [{}, ProvisioningError("not allowed")])
def test_nodes_stay_in_the_order_of_their_launch_where_nobody_tells_and_a_line_says_so(answer, caplog):
    cluster = make_cluster([[1, 1, 1], [1, 1, 1]])
    caplog.set_level(logging.INFO)

    assert by_network(Asked(answer), cluster, traffic_of(cluster)) == cluster
    assert "stay in the order of their launch" in caplog.text


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["s3://b/raw/dt=1/hour=2/x", "s3://b/raw/dt=1/y", "/here/z"], ("b/raw/dt=1",)),
        (["s3://b/raw/dt=1/x?region=us-east-1", "s3://c/y", "/here/z"], ("b/raw/dt=1", "c")),
        (["/here/x", "/here/y", "/here/z"], ()),
    ],
)
def test_nodes_are_let_into_the_folders_that_the_rows_lie_in(paths, expected, tmp_path):
    files = [write_parquet(tmp_path / "in" / f"{number}.parquet", 5) for number in range(3)]
    manifest = prepare(files, tmp_path / "out").manifest
    sources = [replace(source, path=path) for source, path in zip(manifest.sources, paths, strict=True)]
    in_bucket = tuple(number for number, path in enumerate(paths) if path.startswith("s3://"))
    run = RunDirectory(str(tmp_path / "run"))
    assert data_folders(run) == ()

    run.write_json(
        f"{DATA}/{MANIFEST_NAME}",
        replace(manifest, sources=tuple(sources), bucket_files=in_bucket).to_json(),
    )

    assert data_folders(run) == expected
