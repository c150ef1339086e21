import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.training.storage.store import check_store_location

KEY, SECRET = "AKIAEXAMPLE", "wJalr/XUtnFEMI"
WITH_CREDENTIALS = [
    f"s3://{KEY}:hush@bucket/heterps",
    f"s3://{KEY}:{SECRET}@bucket/heterps?region=us-east-1",
    f"s3://{KEY}@bucket",
    f"{KEY}:{SECRET}@bucket",
    f"abfs://:{SECRET}@account.dfs.core.windows.net/container",
    f"gs://{KEY}:{SECRET}@bucket",
    f"s3://bucket/heterps?region=us-east-1&access_key={KEY}",
    f"s3://bucket/heterps?Secret_Key={SECRET}",
    f"s3://bucket/heterps?session%5Ftoken={SECRET}",
    f"abfs://container@account.dfs.core.windows.net/?account_key={SECRET}",
]


@pytest.mark.parametrize("location", WITH_CREDENTIALS)
def test_credentials_in_a_location_are_refused_and_never_repeated(location):
    for accept in (check_store_location, RunDirectory):
        with pytest.raises(ConfigurationError, match="must hold no credentials") as refused:
            accept(location)
        assert not [part for part in (KEY, SECRET, "hush") if part in str(refused.value)]


@pytest.mark.parametrize(
    "location",
    [
        "s3://bucket/heterps?region=us-east-1&endpoint_override=127.0.0.1:9000&scheme=http",
        "s3://bucket/team@work/heterps",
        "abfs://container@account.dfs.core.windows.net/heterps",
        "gs://anonymous@bucket/heterps",
        "file:///srv/heterps",
        "/srv/team@work/a:b@c?key=1",
        "relative/folder",
    ],
)
def test_locations_without_credentials_pass(location):
    check_store_location(location)
