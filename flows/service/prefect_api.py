"""A few questions to a Prefect server over plain HTTP, for what must answer at once or when Prefect is not loaded."""

from __future__ import annotations

import base64
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

from infra.workspace import answers

AUTH_VARIABLES = ("PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING")
"""Prefect's own: what a client sends as user:password, and what a server asks for, in whose shell it is the same."""

TIMEOUT_S = 2.0

SERVER_TIMEOUT_S = 80.0
"""A server that is started at the same time writes its tables at its first start; one that died is started again."""

POLL_S = 0.2


def ask(api_url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the JSON that the server answers to a GET, or to a POST of `body`; None where it does not answer.

    Example:
        >>> ask("http://127.0.0.1:1/api", "/health") is None
        True
    """
    headers = {"content-type": "application/json"}
    if password := next(filter(None, map(os.environ.get, AUTH_VARIABLES)), None):
        headers["authorization"] = f"Basic {base64.b64encode(password.encode()).decode()}"
    data = None if body is None else json.dumps(body).encode()
    # A proxy from the environment must never stand between this machine and its own loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(f"{api_url}{path}", data=data, headers=headers)
        with opener.open(request, timeout=TIMEOUT_S) as response:
            return json.load(response)
    except (urllib.error.URLError, OSError, ValueError):
        return None


def wait_for_server(api_url: str, *, timeout_s: float = SERVER_TIMEOUT_S) -> None:
    """Return once a server answers, or after `timeout_s`, when the next call says why it does not."""
    deadline_s = time.monotonic() + timeout_s
    while not answers(f"{api_url}/health", timeout_s=TIMEOUT_S) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
