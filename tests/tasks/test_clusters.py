from dataclasses import replace

import pytest

from heterps_core.errors import ConfigurationError
from infra.providers import get_provider
from infra.workspace import RUN_STORE_VARIABLE, Workspace
from tasks.clusters import data_folders
from tests.heterps_core.data.synthetic_rows import prepare, write_parquet
from tests.heterps_core.training.storage.test_store_location import KEY, SECRET, WITH_CREDENTIALS


@pytest.mark.parametrize("location", WITH_CREDENTIALS)
def test_a_run_store_with_credentials_is_refused_before_any_machine_is_reported(
    location, monkeypatch, tmp_path
):
    monkeypatch.setenv(RUN_STORE_VARIABLE, location)

    with pytest.raises(ConfigurationError, match="must hold no credentials") as refused:
        get_provider("aws").run_location(Workspace(root=tmp_path), "r1")

    assert not [part for part in (KEY, SECRET, "hush") if part in str(refused.value)]


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

    assert data_folders(replace(manifest, sources=tuple(sources), bucket_files=in_bucket)) == expected
