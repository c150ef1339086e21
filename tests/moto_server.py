"""An empty cloud on a loopback port: moto over HTTP, in the process of the test."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator

from moto.server import ThreadedMotoServer

from heterps_core.data.reading.bucket_path import _file_system

REGION = "us-east-1"


@contextlib.contextmanager
def empty_cloud() -> Iterator[dict[str, str]]:
    """Serve, and yield the environment that leads boto3 there.

    All servers of one process share what they know, so that one which starts forgets what others were asked.
    So does Arrow's client of a bucket, which stays with the address at which it first found it.
    """
    _file_system.cache_clear()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        with urllib.request.urlopen(f"{url}/moto-api/reset", data=b""):
            pass
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    finally:
        server.stop()
