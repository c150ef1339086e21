"""A metadata service on this machine, as EC2 instances have it: answers with a token only."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "a-token"


@contextmanager
def metadata_server(values: dict[str, str], *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve `values` by their name below meta-data/ (changes are seen at once); yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            is_asked_rightly = self.headers["X-aws-ec2-metadata-token-ttl-seconds"] is not None
            self._answer(200 if is_asked_rightly and self.path == "/latest/api/token" else 400, TOKEN)

        def do_GET(self) -> None:
            value = values.get(self.path.removeprefix("/latest/meta-data/"))
            if self.headers["X-aws-ec2-metadata-token"] != TOKEN:
                self._answer(401, "")
            else:
                self._answer(404 if value is None else 200, value or "")

        def _answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    server = ThreadingHTTPServer((host, port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> None:
    """Serve until killed: HOST PORT NAME=VALUE..."""
    host, port, *pairs = sys.argv[1:]
    with metadata_server(dict(pair.split("=", 1) for pair in pairs), host=host, port=int(port)):
        threading.Event().wait()


if __name__ == "__main__":
    main()
