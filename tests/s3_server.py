"""A bucket on this machine: moto's S3 over HTTP, as a run directory sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer


@contextlib.contextmanager
def bucket_location(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve an empty bucket and yield the location of a run directory in it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="runs")
        yield f"s3://runs/nightly?region=us-east-1&scheme=http&endpoint_override={host}:{port}"
    finally:
        server.stop()
