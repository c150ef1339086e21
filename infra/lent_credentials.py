"""Lends Arrow the credentials that boto3 finds where a profile assumes a role or signs in, as Arrow can do neither.

Arrow's S3 client asks the address of AWS_CONTAINER_CREDENTIALS_FULL_URI for credentials, as in a container of ECS,
and asks again before they expire, also in the middle of a read (AWS SDKs and Tools Reference Guide, "Container
credential provider"). This process answers there on loopback to those who know the token: itself, and the processes
that it starts.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from botocore.exceptions import BotoCoreError

_ADDRESS_VARIABLE = "AWS_CONTAINER_CREDENTIALS_FULL_URI"
_TOKEN_VARIABLE = "AWS_CONTAINER_AUTHORIZATION_TOKEN"
LENT_FOR = timedelta(minutes=5)
"""Shorter than any credentials that boto3 gives are valid: it renews them ten minutes before their end."""


@cache
def lend_credentials() -> None:
    """Lend what boto3 finds from now on, where no keys are in the environment and no process above lends already."""
    if "AWS_ACCESS_KEY_ID" in os.environ or _ADDRESS_VARIABLE in os.environ:
        return
    # Found before the address is known, as boto3 would ask it, and this process itself, before an instance's role.
    with suppress(BotoCoreError):
        if _found_by_boto3() is None:
            return
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Lender)
    Thread(target=server.serve_forever, daemon=True).start()
    os.environ[_TOKEN_VARIABLE] = secrets.token_urlsafe()
    os.environ[_ADDRESS_VARIABLE] = f"http://127.0.0.1:{server.server_port}/"


@cache
def _found_by_boto3() -> Any:
    from botocore.session import Session

    session = Session()
    # STS is asked in some region, and every region knows the roles of the account.
    session.set_config_variable("region", session.get_config_variable("region") or "us-east-1")
    return session.get_credentials()


class _Lender(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Answer with credentials that are valid for some minutes; Arrow signs nothing where there are none."""
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), os.environ[_TOKEN_VARIABLE].encode()):
            return self.send_error(403)
        try:
            found = _found_by_boto3().get_frozen_credentials()
        except Exception as problem:
            return self.send_error(500, explain=" ".join(str(problem).split()))
        body = {
            "AccessKeyId": found.access_key,
            "SecretAccessKey": found.secret_key,
            "Token": found.token,
            "Expiration": f"{datetime.now(UTC) + LENT_FOR:%Y-%m-%dT%H:%M:%SZ}",
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
        return None

    def log_message(self, *_: object) -> None:
        """Say nothing: credentials are no matter for a log."""
