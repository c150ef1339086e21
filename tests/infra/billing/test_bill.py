import json
from datetime import UTC, datetime, timedelta

import pytest

from heterps_core.plans.provisioning_plan import TableDisk
from infra.billing.bill import bill_for_run
from infra.billing.budget import spent_usd
from infra.ledger.ledger import EndReason, Ledger
from infra.providers.aws.provider import AwsEc2Provider
from infra.providers.here import HereProvider
from infra.providers.local import LocalProvider
from tasks.reports.bills import bill_text
from tests.infra.builders import offer, plan, with_disks

NOW = datetime(2026, 7, 21, tzinfo=UTC)


@pytest.fixture
def ledger(tmp_path):
    """Two machines of 0.36 USD/hour for 100 s and 10 s, one of 3.60 that failed after 30 s, one never had."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    cheap, expensive = offer(price_usd_per_hour=0.36), offer("c7i.xlarge", price_usd_per_hour=3.6)
    requests = plan(cheap, cheap, expensive, expensive).node_requests()
    for request in requests:
        ledger.intend("r", "aws", request, at=NOW)
    for request, seconds, reason in [
        (requests[0], 100, EndReason.RUN_ENDED),
        (requests[1], 10, EndReason.RUN_ENDED),
        (requests[2], 30, EndReason.LAUNCH_FAILED),
    ]:
        ledger.launched("r", request.node_id, provider_instance_id="i", at=NOW)
        ledger.ended("r", request.node_id, reason=reason, at=NOW + timedelta(seconds=seconds))
    ledger.failed("r", requests[3].node_id, reason="no capacity", at=NOW)
    return ledger


@pytest.fixture
def local(tmp_path):
    return LocalProvider(tmp_path / "leases")


def test_each_line_is_seconds_times_price(local, ledger):
    bill = bill_for_run(local, "r", ledger=ledger, now=NOW + timedelta(days=1))

    # By hand: 0.36 USD/hour is 0.0001 USD/s, 3.60 is 0.001.
    assert [
        (line.stage, line.instance_seconds, round(line.usd, 9), line.is_waste) for line in bill.lines
    ] == [
        (0, 100.0, 0.01, False),
        (1, 10.0, 0.001, False),
        (2, 30.0, 0.03, True),
        (3, 0.0, 0.0, True),
    ]
    assert bill.total_usd == pytest.approx(0.041)
    assert bill.failed_launches_usd == pytest.approx(0.03)


def test_a_cloud_charges_a_minute_at_least(ledger):
    bill = bill_for_run(AwsEc2Provider, "r", ledger=ledger, now=NOW)

    assert [line.instance_seconds for line in bill.lines] == [100.0, 60.0, 60.0, 0.0]
    assert not bill.is_dry_run


def test_room_for_rows_of_tables_is_a_service_of_the_machine(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    disk = TableDisk(gigabytes=300, mib_per_s=250, usd_per_hour=0.04)
    for request in with_disks(plan(), disk, disk).node_requests():
        ledger.intend("r", "aws", request, at=NOW)
        ledger.launched("r", request.node_id, provider_instance_id=request.node_id, at=NOW)

    later = NOW + timedelta(hours=3)
    bill = bill_for_run(AwsEc2Provider, "r", ledger=ledger, now=later)

    assert {line.service: line.usd for line in bill.services}["disks for tables"] == pytest.approx(
        2 * 3 * 0.04
    )
    without_bucket = sum(line.usd for line in bill.lines) + sum(line.usd for line in bill.services)
    spent = spent_usd(ledger.entries(), AwsEc2Provider, now=later)
    # What is spent counts heartbeats too, which the bill has from the bucket.
    assert without_bucket == pytest.approx(spent, rel=0.05)


def test_a_machine_that_still_runs_is_charged_until_now(local, tmp_path):
    ledger = Ledger(tmp_path / "other.sqlite")
    ledger.intend("r", "local", plan(offer(price_usd_per_hour=0.36)).node_requests()[0], at=NOW)
    ledger.launched("r", "stage0-node0", provider_instance_id="i", at=NOW)

    bill = bill_for_run(local, "r", ledger=ledger, now=NOW + timedelta(seconds=50))

    assert bill.total_usd == pytest.approx(0.005)
    assert bill.lines[0].ended_because == "still running"


def test_a_machine_that_was_never_had_is_not_called_running(local, tmp_path):
    ledger = Ledger(tmp_path / "other.sqlite")
    ledger.intend("r", "local", plan(offer()).node_requests()[0], at=NOW)

    (line,) = bill_for_run(local, "r", ledger=ledger, now=NOW + timedelta(seconds=50)).lines

    assert (line.usd, line.ended_because) == (0.0, "not launched yet")


def test_machines_of_one_kind_share_a_line(local, tmp_path):
    ledger = Ledger(tmp_path / "other.sqlite")
    twins = plan(offer()).node_requests() * 2
    for name, request in zip(["a", "b"], twins, strict=True):
        named = type(request)(
            **{f: getattr(request, f) for f in request.__dataclass_fields__} | {"node_id": name}
        )
        ledger.intend("r", "local", named, at=NOW)
        ledger.launched("r", name, provider_instance_id=name, at=NOW)
    ledger.close_run("r", reason=EndReason.RUN_ENDED, at=NOW + timedelta(seconds=7))

    (line,) = bill_for_run(local, "r", ledger=ledger, now=NOW).lines

    assert (line.count, line.instance_seconds) == (2, 14.0)


def test_the_text_says_that_a_dry_run_charges_nothing_and_how_old_the_prices_are(local, ledger):
    text = " ".join(bill_text(bill_for_run(local, "r", ledger=ledger, now=NOW)).split())

    assert "nothing is charged" in text
    assert "total 0.041000 USD, of it 0.030000 USD for launches that failed" in text
    assert "prices as of 2026-07-20 (test)" in text


def test_the_json_form_holds_the_sums(local, ledger):
    document = json.loads(json.dumps(bill_for_run(local, "r", ledger=ledger, now=NOW).to_json()))

    assert document["total_usd"] == pytest.approx(0.041)
    assert document["lines"][0]["price_source"] == "test"


def test_a_machine_of_no_price_is_billed_nothing_and_is_no_dry_run(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    [request] = plan(offer(price_usd_per_hour=0.0)).node_requests()
    ledger.intend("r", "here", request, at=NOW)
    ledger.launched("r", request.node_id, provider_instance_id="i", at=NOW)
    ledger.ended("r", request.node_id, reason=EndReason.RUN_ENDED, at=NOW + timedelta(seconds=100))

    bill = bill_for_run(HereProvider, "r", ledger=ledger, now=NOW + timedelta(days=1))

    assert [line.instance_seconds for line in bill.lines] == [100.0]
    assert (bill.total_usd, bill.is_dry_run) == (0.0, False)
    assert "provider here, charged: 0.000000 USD" in bill_text(bill)
