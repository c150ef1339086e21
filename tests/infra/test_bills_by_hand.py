"""Three bills worked by hand, step by step: machines on spot, machines that were preempted, and a bucket."""

from datetime import UTC, datetime, timedelta

import pytest

from heterps_core.hardware import Market
from heterps_core.training.storage.store import StorageUsage
from infra.billing.bill import FREE, bill_for_run
from infra.ledger.ledger import EndReason, Ledger
from infra.prices.spot_charges import SpotHistory
from infra.providers.aws.provider import AwsEc2Provider
from tasks.reports.bills import bill_text
from tests.infra.builders import offer, plan

LAUNCHED_AT = datetime(2026, 7, 31, 22, 30, tzinfo=UTC)


PROVIDER = AwsEc2Provider


def launched(ledger, *machines):
    """Write machines down that began at the same time; each is (offer, seconds until its end, reason of its end)."""
    requests = plan(*(of for of, *_ in machines)).node_requests()
    for number, (request, (_, seconds, *reasons)) in enumerate(zip(requests, machines, strict=True)):
        ledger.intend("r", "aws", request, at=LAUNCHED_AT)
        ledger.launched("r", request.node_id, provider_instance_id=f"i-{number}", at=LAUNCHED_AT)
        ended_at = LAUNCHED_AT + timedelta(seconds=seconds)
        reason = reasons[0] if reasons else EndReason.RUN_ENDED
        ledger.ended("r", request.node_id, reason=reason, at=ended_at)


def history_of(*changes):
    """Price changes as (minutes after the launch, USD an hour)."""
    return SpotHistory(
        times=tuple(LAUNCHED_AT + timedelta(minutes=minutes) for minutes, _ in changes),
        prices_usd_per_hour=tuple(usd for _, usd in changes),
        source="price history",
    )


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ledger.sqlite")


def test_a_spot_machine_pays_the_price_at_the_beginning_of_each_of_its_hours(ledger):
    spot = offer(price_usd_per_hour=0.03, market=Market.SPOT)
    launched(ledger, (spot, 9_000), (offer("c7i.xlarge", price_usd_per_hour=0.17), 9_000))
    # In effect at the launch 0.04; 0.06 from minute 30 on, 0.05 from minute 90, 0.09 from minute 121.
    history = history_of((-600, 0.04), (30, 0.06), (90, 0.05), (121, 0.09))

    bill = bill_for_run(PROVIDER, "r", ledger=ledger, now=LAUNCHED_AT, spot_prices={"i-0": history})

    # Spot, 2.5 hours: the first begins at 0.04, the second (minute 60) at 0.06, the half third (minute 120) at 0.05:
    #     0.04 + 0.06 + 0.5 * 0.05 = 0.125; in the mean 0.125 / 2.5 = 0.05 an hour.
    # On-demand, 2.5 hours: 2.5 * 0.17 = 0.425.
    # Disks: 2 * 40 GB * 2.5 h / 730 h = 0.27397 GB-months * 0.08 = 0.021918; addresses: 2 * 2.5 h * 0.005 = 0.025.
    assert [(line.market, line.usd, line.price_usd_per_hour) for line in bill.lines] == [
        ("spot", pytest.approx(0.125), pytest.approx(0.05)),
        ("on-demand", pytest.approx(0.425), 0.17),
    ]
    assert bill.lines[0].price_source == "price history"
    assert bill.total_usd == pytest.approx(0.125 + 0.425 + 0.021918 + 0.025, abs=1e-6)


def test_what_ec2_takes_in_its_first_hour_is_not_charged_and_what_we_end_is(ledger):
    spot = offer(price_usd_per_hour=0.36, market=Market.SPOT)
    launched(
        ledger,
        # Taken after 59 minutes and 59 s: nothing.
        (spot, 3_599, EndReason.PREEMPTED),
        # Taken after 90 minutes: its seconds, 1 h at 0.36 and half an hour at 0.72.
        (spot, 5_400, EndReason.PREEMPTED),
        # Ended by us after half an hour, with the first hour not over: its seconds.
        (spot, 1_800),
        # Ended by us after 10 s: a minute is the least.
        (spot, 10),
    )
    prices = dict.fromkeys(("i-0", "i-1", "i-2", "i-3"), history_of((-5, 0.36), (45, 0.72)))

    bill = bill_for_run(PROVIDER, "r", ledger=ledger, now=LAUNCHED_AT, spot_prices=prices)

    # 0 + (0.36 + 0.5 * 0.72) + 0.5 * 0.36 + 60 s * 0.0001 = 0.72 + 0.18 + 0.006.
    assert [(line.stage, line.instance_seconds, line.usd, line.ended_because) for line in bill.lines] == [
        (0, 0.0, 0.0, FREE),
        (1, 5_400.0, pytest.approx(0.72), EndReason.PREEMPTED),
        (2, 1_800.0, pytest.approx(0.18), EndReason.RUN_ENDED),
        (3, 60.0, pytest.approx(0.006), EndReason.RUN_ENDED),
    ]
    assert sum(line.usd for line in bill.lines) == pytest.approx(0.906)
    assert FREE in bill_text(bill)


def test_a_bucket_is_charged_by_what_it_keeps_for_how_long_and_by_what_leaves_it(ledger):
    launched(ledger, (offer(price_usd_per_hour=0.36), 10_800))
    storage = StorageUsage(
        put_requests=120_000,
        get_requests=500_000,
        # 1,200 checkpoints of 538.9 GB were written; two of them stood there at any time, for three hours.
        bytes_written=646_609 * 10**9,
        stored_byte_s=2 * 538.9e9 * 3 * 3_600,
        egress_bytes=int(10e9),
    )

    bill = bill_for_run(PROVIDER, "r", ledger=ledger, now=LAUNCHED_AT, storage=storage)

    # Machine: 3 h * 0.36 = 1.08; disk: 40 GB * 3 / 730 * 0.08 = 0.013151; address: 3 * 0.005 = 0.015.
    # Requests: 120 * 0.005 = 0.6 and 500 * 0.0004 = 0.2.
    # Kept: 1,077.8 GB * 3 h / 730 h = 4.429315 GB-months * 0.023 = 0.101874; not 646,609 * 0.023 = 14,872.
    # Out of the region: 10 GB * 0.09 = 0.9.
    assert {line.service: round(line.usd, 6) for line in bill.services} == {
        "disks": 0.013151,
        "public addresses": 0.015,
        "requests that write or list": 0.6,
        "requests that read": 0.2,
        "stored data": 0.101874,
        "traffic out of the region": 0.9,
    }
    assert bill.total_usd == pytest.approx(1.08 + 0.013151 + 0.015 + 0.6 + 0.2 + 0.101874 + 0.9, abs=1e-5)


def test_a_spot_machine_without_a_price_history_is_charged_as_planned(ledger):
    launched(ledger, (offer(price_usd_per_hour=0.36, market=Market.SPOT), 3_600))

    (line,) = bill_for_run(PROVIDER, "r", ledger=ledger, now=LAUNCHED_AT).lines

    assert (line.usd, line.price_source) == (pytest.approx(0.36), "test")
