import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.instance_metadata import ENDPOINT_VARIABLE, InstanceMetadata
from tests.metadata_server import metadata_server

INTERRUPTION = '{"action": "terminate", "time": "2026-11-21T04:02:00Z"}'
RECOMMENDATION = '{"noticeTime": "2026-11-21T03:40:00Z"}'


def test_a_machine_learns_its_id_with_a_token(monkeypatch):
    with metadata_server({"instance-id": "i-0abc"}) as address:
        monkeypatch.setenv(ENDPOINT_VARIABLE, address)

        assert InstanceMetadata().instance_id() == "i-0abc"


def test_without_the_service_the_error_says_what_is_missing():
    with pytest.raises(ConfigurationError, match="without HETERPS_NODE_ID must be an EC2 instance"):
        InstanceMetadata("http://127.0.0.1:9").instance_id()


@pytest.mark.parametrize(
    ("values", "kind", "at"),
    [
        ({"spot/instance-action": INTERRUPTION}, "spot interruption", "2026-11-21T04:02:00Z"),
        (
            {"events/recommendations/rebalance": RECOMMENDATION},
            "rebalance recommendation",
            "2026-11-21T03:40:00Z",
        ),
        (
            {"events/recommendations/rebalance": RECOMMENDATION, "spot/instance-action": INTERRUPTION},
            "spot interruption",
            "2026-11-21T04:02:00Z",
        ),
    ],
)
def test_the_gravest_notice_is_told(values, kind, at):
    with metadata_server(values) as address:
        notice = InstanceMetadata(address).leaving_notice()

    assert (notice.kind, notice.at) == (kind, at)


def test_no_notice_is_none():
    with metadata_server({}) as address:
        assert InstanceMetadata(address).leaving_notice() is None
