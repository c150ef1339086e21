import pytest

from heterps_core.errors import ProvisioningError
from infra.workspace import free_loopback_port


def test_says_so_when_no_port_is_free(monkeypatch):
    def refuse(self, address):
        raise OSError(98, "Address already in use")

    monkeypatch.setattr("socket.socket.bind", refuse)

    with pytest.raises(ProvisioningError, match=r"one free TCP port on 127\.0\.0\.1"):
        free_loopback_port()
