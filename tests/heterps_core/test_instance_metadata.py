import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.instance_metadata import ENDPOINT_VARIABLE, InstanceMetadata
from tests.metadata_server import metadata_server

INTERRUPTION = '{"action": "terminate", "time": "2026-11-21T04:02:00Z"}'


def test_a_machine_learns_its_id_with_a_token(monkeypatch):
    with metadata_server({"instance-id": "i-0abc"}) as address:
        monkeypatch.setenv(ENDPOINT_VARIABLE, address)

        assert InstanceMetadata().instance_id() == "i-0abc"


def test_without_the_service_the_error_says_what_is_missing():
    with pytest.raises(ConfigurationError, match="without HETERPS_NODE_ID must be an EC2 instance"):
        InstanceMetadata("http://127.0.0.1:9").instance_id()


def test_a_notice_says_when_the_machine_ends():
    with metadata_server({"spot/instance-action": INTERRUPTION}) as address:
        assert InstanceMetadata(address).interrupted_at() == "2026-11-21T04:02:00Z"


def test_no_notice_is_none():
    with metadata_server({}) as address:
        assert InstanceMetadata(address).interrupted_at() is None
