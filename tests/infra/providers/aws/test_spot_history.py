"""What EC2 says of spot machines, in answers as its API reference shows them: moto has one price, no preemption."""

from datetime import UTC, datetime, timedelta

import boto3
import pytest
from botocore.stub import ANY, Stubber

from heterps_core.hardware import Market
from infra.ledger.ledger import EndReason, Ledger
from infra.providers.aws.provider import AwsEc2Provider
from infra.workspace import Workspace
from tasks.clusters import bills_of_run, keep_spot_prices, local_folder
from tests.infra.builders import offer, plan

LAUNCHED_AT = datetime(2026, 7, 20, 4, 30, tzinfo=UTC)


def instance(number, *, code, reason):
    return {
        "InstanceId": f"i-{number}",
        "InstanceType": "c7i.large",
        "LaunchTime": LAUNCHED_AT,
        "Placement": {"AvailabilityZone": "us-east-1b"},
        "State": {"Name": "terminated", "Code": 48},
        "StateReason": {"Code": code, "Message": code},
        "StateTransitionReason": reason,
    }


def price(zone, usd, minutes):
    return {
        "InstanceType": "c7i.large",
        "AvailabilityZone": zone,
        "SpotPrice": usd,
        "Timestamp": LAUNCHED_AT + timedelta(minutes=minutes),
        "ProductDescription": "Linux/UNIX",
    }


@pytest.fixture
def client():
    return boto3.client("ec2", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")


@pytest.fixture
def stub(client):
    with Stubber(client) as stub:
        yield stub


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))
    workspace = Workspace.locate().create()
    ledger = Ledger(workspace.ledger_path)
    spot = offer(price_usd_per_hour=0.03, market=Market.SPOT)
    for number, request in enumerate(plan(spot, spot, offer()).node_requests()):
        ledger.intend("r1", "aws", request, at=LAUNCHED_AT)
        ledger.launched("r1", request.node_id, provider_instance_id=f"i-{number}", at=LAUNCHED_AT)
        ended_at = LAUNCHED_AT + timedelta(hours=2)
        ledger.ended("r1", request.node_id, reason=EndReason.RUN_ENDED, at=ended_at)
    return workspace


def test_the_prices_of_ended_spot_machines_are_frozen_into_the_bill(workspace, client, stub):
    answers = [
        instance(0, code="Server.SpotInstanceTermination", reason="Server.SpotInstanceTermination"),
        instance(1, code="Client.UserInitiatedShutdown", reason="User initiated (2026-07-20 06:00:00 GMT)"),
    ]
    stub.add_response(
        "describe_instances", {"Reservations": []}, {"Filters": ANY}
    )  # EC2 has forgotten their tags
    stub.add_response("describe_instances", {"Reservations": [{"Instances": answers}]}, {"Filters": ANY})
    stub.add_response(
        "describe_spot_price_history",
        {
            "SpotPriceHistory": [
                price("us-east-1b", "0.0600", 45),
                price("us-east-1a", "0.9000", 10),
                price("us-east-1b", "0.0400", -300),
            ]
        },
        {
            "InstanceTypes": ["c7i.large"],
            "ProductDescriptions": ["Linux/UNIX"],
            "StartTime": LAUNCHED_AT,
        },
    )

    keep_spot_prices(workspace, AwsEc2Provider(client), "r1")

    stub.assert_no_pending_responses()
    (bill,) = bills_of_run(workspace, "aws", "r1")
    lines = {(line.stage, round(line.usd, 6), line.price_source[:3]) for line in bill.lines}
    # By hand, 2 h each: 0.04 + 0.06 on spot; on-demand at 0.09.
    assert lines == {(0, 0.1, "EC2"), (1, 0.1, "EC2"), (2, 0.18, "tes")}
    # Made again without any cloud it is the same.
    assert bills_of_run(workspace, "aws", "r1")[0].lines == bill.lines


def test_where_ec2_does_not_answer_the_planned_price_stays(workspace, client, stub, caplog):
    stub.add_client_error("describe_instances", service_error_code="ExpiredToken")

    keep_spot_prices(workspace, AwsEc2Provider(client), "r1")

    assert "are billed at the prices of their launch" in caplog.text
    (bill,) = bills_of_run(workspace, "aws", "r1")
    assert sum(line.usd for line in bill.lines) == pytest.approx(2 * (0.03 + 0.03 + 0.09))


def test_the_prices_of_an_earlier_version_are_read(workspace):
    """It kept the end of a machine beside its prices."""
    of_before = {
        "times": [LAUNCHED_AT.isoformat()],
        "prices_usd_per_hour": [0.05],
        "source": "EC2",
        "is_preempted": False,
        "ended_at": None,
    }
    local_folder(workspace, "r1").write_json("spot.json", {"i-0": of_before})

    (bill,) = bills_of_run(workspace, "aws", "r1")

    assert {line.price_usd_per_hour for line in bill.lines if line.stage == 0} == {0.05}
