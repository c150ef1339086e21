"""Who may speak with a server on loopback: this user alone.

Loopback is open to every account of a machine, and to the pages of every site that its browsers show: by a form that
is sent to it, or under a name that a foreign name server points at it (DNS rebinding).
"""

from __future__ import annotations

import base64
import hmac
import os
import re
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeAlias

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")

HEALTH_PATH = "/health"
"""Answered without a password, so that a supervisor can ask whether a server is up."""

_LOOPBACK_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]+)?")

ROOT = 0
_LISTENING = "0A"
"""TCP_LISTEN of the kernel's include/net/tcp_states.h, as /proc/net/tcp has it."""

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))

_TAKING_LOOPBACK = ("127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1", "::ffff:0.0.0.0", "::")
"""Addresses of sockets that take a connection to 127.0.0.1; the kernel prefers the first."""

_PROXY_EXCEPTIONS = ("no_proxy", "NO_PROXY")
_SPOKEN_SCHEMES = ("http", "https")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def keep_loopback_from_proxies(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let no client of this process or its children send to loopback by way of a proxy.

    All forms are set: curl reads the lower case, urllib and httpx prefer it, and others read the upper case alone. A
    proxy that httpx cannot speak with, such as one for SOCKS, is left out: it would refuse to ask loopback, too.
    """
    for name in [name for name in environment if name.lower() in _PROXIES]:
        scheme, separator, _ = environment[name].lower().partition("://")
        if separator and scheme not in _SPOKEN_SCHEMES and find_spec("socksio") is None:
            del environment[name]
    named = next((environment[name] for name in _PROXY_EXCEPTIONS if environment.get(name)), "")
    listed = [name.strip() for name in named.split(",") if name.strip()]
    exceptions = ",".join([*listed, *(name for name in LOOPBACK_NAMES if name not in listed)])
    environment.update(dict.fromkeys(_PROXY_EXCEPTIONS, exceptions))


def another_account_listens(port: int) -> bool:
    """Tell whether a port of 127.0.0.1 is held by another account, which must not be sent a password.

    It may take the port of a server that has died. Where the kernel does not tell, nobody is called another.
    """
    holders: dict[str, int] = {}
    for table in _TABLES:
        with suppress(OSError, ValueError, IndexError):
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                address, _, number = fields[1].rpartition(":")
                if fields[3] == _LISTENING and int(number, 16) == port:
                    holders[address] = int(fields[7])
    taking = map(_in_table, _TAKING_LOOPBACK)
    holder = next((holders[address] for address in taking if address in holders), ROOT)
    return holder not in (os.geteuid(), ROOT)


def _in_table(address: str) -> str:
    """Return an address as the kernel's tables have it: words of 32 bits in the order of this machine."""
    packed = ip_address(address).packed
    words = [packed[first : first + 4] for first in range(0, len(packed), 4)]
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)


class LoopbackGuard:
    """An ASGI application around another one, which answers only what this user may have sent.

    Args:
        app: The server's own application.
        password: The user:password that each request must bring; None where the server asks for it by itself.
    """

    def __init__(self, app: App, *, password: str | None = None) -> None:
        self._app = app
        self._authorization = None if password is None else b"Basic " + base64.b64encode(password.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it with 403 (a foreign name or page) or 401 (no password)."""
        status = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if status is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain")]
            if status == 401:
                headers.append((b"www-authenticate", b'Basic realm="heterps", charset="UTF-8"'))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": _REASONS[status]})

    def _refusal(self, scope: Scope) -> int | None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if not _LOOPBACK_HOST.fullmatch(host):
            return 403
        # Browsers name the page that sends; other programs name none.
        if headers.get(b"origin", f"http://{host}".encode("latin-1")).decode("latin-1") != f"http://{host}":
            return 403
        if self._authorization is None or scope["path"] == HEALTH_PATH:
            return None
        is_known = hmac.compare_digest(headers.get(b"authorization", b""), self._authorization)
        return None if is_known else 401


_REASONS = {
    401: b"this server asks for the user and password that heterps serve printed\n",
    403: b"this server answers under its names of loopback alone, and its own pages\n",
}
