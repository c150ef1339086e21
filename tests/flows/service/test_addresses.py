import os
import socket

import pytest

from flows.service.addresses import Port, bind_host, check_password, is_loopback
from heterps_core.errors import ConfigurationError


def test_loopback_is_served_by_default_and_needs_no_password():
    assert bind_host({}) == "127.0.0.1"
    check_password("127.0.0.1", {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "*"])
def test_a_wildcard_is_refused(host):
    with pytest.raises(ConfigurationError, match="must be the one address or name"):
        bind_host({"HETERPS_HOST": host})


def test_an_address_of_another_machine_is_refused():
    # TEST-NET-2 of RFC 5737 belongs to nobody.
    with pytest.raises(
        ConfigurationError, match=r"must be an address of this machine, got '198\.51\.100\.1'"
    ):
        bind_host({"HETERPS_HOST": "198.51.100.1"})


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.5", True), ("localhost", True), ("198.51.100.1", False)]
)
def test_loopback_is_told_from_the_rest(host, expected):
    assert is_loopback(host) is expected


@pytest.mark.parametrize("password", ["", "team:", ":long-enough-secret", "team:short", "long-enough-secret"])
def test_others_than_this_machine_need_a_password(password):
    with pytest.raises(
        ConfigurationError, match=r"PREFECT_SERVER_API_AUTH_STRING has none.*unset HETERPS_HOST"
    ):
        check_password("198.51.100.1", {"PREFECT_SERVER_API_AUTH_STRING": password})


def test_a_page_that_could_not_ask_for_a_password_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ConfigurationError, match="pip install 'Flask-WTF<2'"):
        check_password("198.51.100.1", {"PREFECT_SERVER_API_AUTH_STRING": "team:long-enough-secret"})


def test_a_free_port_passes_and_a_taken_one_names_its_owner():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        number = listener.getsockname()[1]
        port = Port("a test", "PORT_X", number)
        with pytest.raises(
            ConfigurationError, match=rf"port {number}.*by process {os.getpid()}.*PORT_X=<port>"
        ):
            port.check_is_free()

    port.check_is_free()
