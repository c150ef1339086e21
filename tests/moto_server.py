"""An empty cloud on a loopback port: moto over HTTP, in the process of the test."""

from __future__ import annotations

import contextlib
import threading
import urllib.request
from collections.abc import Iterator

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import make_server

from heterps_core.data.reading.bucket_path import _file_system

REGION = "us-east-1"


@contextlib.contextmanager
def empty_cloud() -> Iterator[dict[str, str]]:
    """Serve, and yield the environment that leads boto3 there.

    All servers of one process share what they know, so that one which starts forgets what others were asked.
    So does Arrow's client of a bucket, which stays with the address at which it first found it.
    """
    _file_system.cache_clear()
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
    # Moto's own thread looks every half a second whether it is to stop.
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
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
        server.shutdown()
        thread.join()
