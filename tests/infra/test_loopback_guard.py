import asyncio
import base64
import os
import socket
import subprocess
from contextlib import contextmanager

import httpx
import pytest

from infra.loopback_guard import LoopbackGuard, another_account_listens, keep_loopback_from_proxies
from infra.workspace import ServiceAddresses, Workspace

PASSWORD = "heterps:secret"
SIGNED_IN = {"authorization": f"Basic {base64.b64encode(PASSWORD.encode()).decode()}"}


def answered(headers, *, path="/api", kind="http", password=PASSWORD):
    """Return the first message that a request is answered with; the application behind the guard says 200."""
    sent = []

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    scope = {
        "type": kind,
        "path": path,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    asyncio.run(LoopbackGuard(application, password=password)(scope, None, send))
    return sent[0]


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:4200", "localhost:4200", "localhost", "127.0.0.1", "[::1]:4200", "[::1]", "LOCALHOST:4200"],
)
def test_a_name_of_loopback_is_answered(host):
    assert answered({"host": host, **SIGNED_IN})["status"] == 200
    # Browsers write an origin in lower case (RFC 6454, section 4).
    assert answered({"host": host, "origin": f"http://{host.lower()}", **SIGNED_IN})["status"] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:4200"},
        {"host": "127.0.0.1.evil.example:4200"},
        {"host": "localhost.evil.example"},
        {"host": "192.168.1.7:4200"},
        {"host": "localhost.:4200"},
        {"host": ""},
        {},
        {"host": "127.0.0.1:4200", "origin": "http://evil.example"},
        {"host": "127.0.0.1:4200", "origin": "null"},
        {"host": "127.0.0.1:4200", "origin": "http://127.0.0.1:8000"},
        {"host": "127.0.0.1:4200", "origin": "https://127.0.0.1:4200"},
    ],
)
def test_a_foreign_name_or_page_is_refused_even_with_the_password(headers):
    assert answered({**headers, **SIGNED_IN})["status"] == 403
    assert answered({**headers, **SIGNED_IN}, path="/health")["status"] == 403


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Basic", f"Bearer {PASSWORD}", "Basic aGV0ZXJwczp3cm9uZw=="],
)
def test_a_request_without_the_password_is_asked_for_it(authorization):
    sent = {} if authorization is None else {"authorization": authorization}
    refused = answered({"host": "127.0.0.1:4200", **sent})

    assert refused["status"] == 401
    assert dict(refused["headers"])[b"www-authenticate"].startswith(b"Basic ")


def test_an_empty_password_opens_nothing():
    assert answered({"host": "127.0.0.1:4200"}, password="")["status"] == 401


def test_the_health_of_a_server_needs_no_password():
    assert answered({"host": "127.0.0.1:4200"}, path="/health")["status"] == 200
    assert answered({"host": "127.0.0.1:4200"}, path="/x/health")["status"] == 401


def test_a_server_that_asks_by_itself_is_guarded_from_foreign_names_alone():
    assert answered({"host": "127.0.0.1:4200"}, password=None)["status"] == 200
    assert answered({"host": "evil.example"}, password=None)["status"] == 403


def test_a_socket_of_a_foreign_page_is_closed():
    foreign = {"host": "127.0.0.1:4200", "origin": "http://evil.example"}

    assert answered(foreign, kind="websocket", password=None) == {"type": "websocket.close", "code": 1008}


LISTEN = """
import socket, sys
address, port = sys.argv[1:]
is_ipv6 = ":" in address
family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
with socket.create_server((address, int(port)), family=family, dualstack_ipv6=is_ipv6) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@contextmanager
def listener(address, *, user, port=0):
    """Run a program of an account that listens, and yield its port."""
    with subprocess.Popen(
        ["/usr/bin/python3", "-I", "-c", LISTEN, address, str(port)],
        user=user,
        group=user,
        extra_groups=[],
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield int(process.stdout.readline())
        process.stdin.close()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a second account needs root")
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::"])
@pytest.mark.parametrize("user", [0, 65_534])
def test_the_port_of_a_dead_server_that_another_account_took_is_not_this_users(tmp_path, user, address):
    with listener(address, user=user) as port:
        workspace = Workspace(root=tmp_path)
        addresses = ServiceAddresses(
            prefect_url=f"http://127.0.0.1:{port}", mlflow_url="http://127.0.0.1:1", supervisor_pid=1
        )
        workspace.write_services(addresses)

        assert workspace.recorded_services() == (None if user else addresses)
        assert another_account_listens(port) is bool(user)

    assert not another_account_listens(port)
    assert workspace.recorded_services() == addresses


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a second account needs root")
@pytest.mark.parametrize("address", ["127.0.0.2", "::1"])
def test_an_account_that_listens_elsewhere_does_not_hide_this_users_server(address):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with listener(address, user=65_534, port=port):
            assert not another_account_listens(port)


@pytest.mark.parametrize(
    ("given", "exceptions"),
    [
        ({}, "127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "corp.example, localhost"}, "corp.example,localhost,127.0.0.1,::1"),
        ({"no_proxy": "a.example", "NO_PROXY": "b.example"}, "a.example,127.0.0.1,localhost,::1"),
    ],
)
def test_loopback_is_added_to_the_exceptions_of_every_proxy(given, exceptions):
    environment = {"HTTPS_PROXY": "http://proxy.example:3128", **given}

    keep_loopback_from_proxies(environment)
    keep_loopback_from_proxies(environment)

    assert environment == {
        "HTTPS_PROXY": "http://proxy.example:3128",
        "no_proxy": exceptions,
        "NO_PROXY": exceptions,
    }


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize(
    "proxy", ["http://127.0.0.1:9", "127.0.0.1:9", "socks5://127.0.0.1:9", "socks5h://127.0.0.1:9"]
)
def test_httpx_sends_nothing_for_loopback_to_a_proxy(monkeypatch, name, proxy):
    for each in [each for each in os.environ if each.lower().endswith("_proxy")]:
        monkeypatch.delenv(each)
    monkeypatch.setenv(name, proxy)
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "")
    keep_loopback_from_proxies()

    with httpx.Client() as client:
        chosen = client._transport_for_url(httpx.URL("http://127.0.0.1:4200/api"))

    assert chosen is client._transport
