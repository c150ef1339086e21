"""A node that boots while its role is late: no credentials yet, a bucket that refuses it, or one that is busy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from heterps_core.training.storage.run_directory import RunDirectory
from infra.bootstrap.node_start import BOOTSTRAP_SCRIPT, publish_node_wheel
from tests.infra.fault_cases import Case
from tests.metadata_server import metadata_server
from tests.moto_server import REGION

FORMS = ("no credentials", "refused", "busy")
_ROLE = "iam/security-credentials"
_CREDENTIALS = """{"Code": "Success", "LastUpdated": "2026-01-01T00:00:00Z", "Type": "AWS-HMAC",
"AccessKeyId": "test", "SecretAccessKey": "test", "Token": "test", "Expiration": "2099-01-01T00:00:00Z"}"""
_PAUSE_S = 3.0

_PRETENDED = f"""sleep() {{
  if [ "$1" = {_PAUSE_S:g} ]; then
    SECONDS=$((SECONDS + {_PAUSE_S:g}))
    echo >>"$SLEPT"
  else
    command sleep "$1"
  fi
}}
"""
"""The pause between two tries of the bootstrap takes no time, and counts as its seconds."""


class Boot(NamedTuple):
    """How a node came up."""

    survived: bool
    """Its program ran."""

    num_met: int
    """How often it met the role late."""

    waited_s: float
    """Its seconds, with the pretended ones."""


def node_boots(case: Case, folder: Path) -> Boot:
    """Boot a node by the real script from a bucket that serves it when the case's time has passed."""
    folder.mkdir(parents=True)
    wheel = publish_node_wheel(RunDirectory(str(folder / "elsewhere")), "ctrdnn")
    slept = folder / "slept"
    slept.touch()
    (folder / "pretended.sh").write_text(_PRETENDED)
    begun_s, form = time.monotonic(), FORMS[case.choice % len(FORMS)]
    values: dict[str, str] = {}
    met = 0

    def is_late() -> bool:
        nonlocal met
        passed_s = time.monotonic() - begun_s + _PAUSE_S * slept.stat().st_size
        if passed_s >= case.lasts_s:
            values.update({_ROLE: "node", f"{_ROLE}/node": _CREDENTIALS})
        met += passed_s < case.lasts_s
        return passed_s < case.lasts_s

    with metadata_server(values) as metadata, _bucket(wheel.content, form, is_late) as address:
        environment = {
            "PATH": os.environ["PATH"],
            "BASH_ENV": str(folder / "pretended.sh"),
            "SLEPT": str(slept),
            "TMPDIR": str(folder),
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata,
            "HETERPS_NODE_IS": "process",
            "HETERPS_NODE_ID": "stage0-node0",
            "HETERPS_RUN_ID": "r1",
            "HETERPS_RUN_DIR": f"s3://runs/night?region={REGION}&scheme=http&endpoint_override={address}",
            "HETERPS_PYTHON": sys.executable,
            "HETERPS_LIFETIME_S": "600",
            "HETERPS_LEASE_S": "6000",
            "HETERPS_WHEEL": wheel.key,
            "HETERPS_WHEEL_SHA256": wheel.sha256,
        }
        command = ["bash", str(BOOTSTRAP_SCRIPT), "-c", "import heterps_core"]
        ended = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, check=False
        )
    survived = ended.returncode == 0
    if not survived:
        print(ended.stderr[-2_000:], flush=True)
    waited_s = time.monotonic() - begun_s + _PAUSE_S * slept.stat().st_size
    return Boot(survived=survived, num_met=met, waited_s=waited_s)


@contextmanager
def _bucket(content: bytes, form: str, is_late: Callable[[], bool]) -> Iterator[str]:
    """Serve one object as S3 does, refused or busy while the role is late; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            late = is_late()
            if late and form == "busy":
                self._send(503, b"<Error><Code>SlowDown</Code></Error>")
            elif (late and form == "refused") or "Authorization" not in self.headers:
                self._send(403, b"<Error><Code>AccessDenied</Code></Error>")
            else:
                first, _, last = (self.headers["Range"] or "bytes=0-").removeprefix("bytes=").partition("-")
                end = int(last) + 1 if last else len(content)
                self._send(206 if self.headers["Range"] else 200, content[int(first) : end])

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    bucket = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=bucket.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{bucket.server_port}"
    finally:
        bucket.shutdown()
        bucket.server_close()
        thread.join()
