"""A bucket on this machine: moto's S3 over HTTP, as a run directory sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import boto3
import pytest

from tests.moto_server import REGION, empty_cloud


@contextlib.contextmanager
def bucket_location(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve an empty bucket and yield the location of a run directory in it."""
    with empty_cloud() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="runs")
        address = environment["AWS_ENDPOINT_URL"].removeprefix("http://")
        yield f"s3://runs/nightly?region={REGION}&scheme=http&endpoint_override={address}"
