from datetime import UTC, datetime, timedelta

import pytest

from infra.billing.bill import bill_for_run, waste_lines
from infra.ledger.ledger import EndReason, Ledger
from infra.providers.local import LocalProvider
from tasks.reports.bills import waste_text
from tests.infra.builders import offer, plan

NOW = datetime(2026, 11, 21, tzinfo=UTC)


def make_bill(tmp_path, *, seconds, failed_seconds=None):
    """Two machines of 3.60 USD/hour (0.002 USD/s together), and maybe a third whose launch failed."""
    ledger, expensive = Ledger(tmp_path / "ledger.sqlite"), offer(price_usd_per_hour=3.6)
    lives = [(seconds, EndReason.RUN_ENDED)] * 2
    if failed_seconds is not None:
        lives.append((failed_seconds, EndReason.LAUNCH_FAILED))
    requests = plan(*[expensive] * len(lives)).node_requests()
    for request, (lived, reason) in zip(requests, lives, strict=True):
        ledger.intend("r", "local", request, at=NOW)
        ledger.launched("r", request.node_id, provider_instance_id="i", at=NOW)
        ledger.ended("r", request.node_id, reason=reason, at=NOW + timedelta(seconds=lived))
    return bill_for_run(LocalProvider(tmp_path / "leases"), "r", ledger=ledger, now=NOW)


def test_each_cause_is_a_part_of_the_total(tmp_path):
    bill = make_bill(tmp_path, seconds=1_000, failed_seconds=60)

    lines = waste_lines([bill], trained_seconds=800, repeated_seconds=100, idle_shares={0: 0.2, 1: 0.0})

    # By hand, at 0.002 USD/s: 200 s without steps, 100 s of steps done again, and a fifth of the 700 s that are left,
    # on one of two machines.
    assert {line.cause: line.usd for line in lines} == {
        "launches that failed": pytest.approx(0.06),
        "start-up, evaluation and teardown": pytest.approx(0.4),
        "steps done again": pytest.approx(0.2),
        "workers that waited for others": pytest.approx(0.14),
    }
    assert sum(line.share for line in lines) == pytest.approx(0.80 / 2.06)


def test_a_run_that_only_trained_wasted_nothing(tmp_path):
    bill = make_bill(tmp_path, seconds=1_000)

    assert waste_lines([bill], trained_seconds=1_000, repeated_seconds=0, idle_shares={}) == ()


def test_clocks_that_disagree_by_seconds_make_no_negative_line(tmp_path):
    bill = make_bill(tmp_path, seconds=1_000)

    lines = waste_lines([bill], trained_seconds=1_003, repeated_seconds=2_000, idle_shares={0: 0.5})

    assert [(line.cause, line.usd) for line in lines] == [("steps done again", pytest.approx(2.0))]


def test_a_launch_that_never_had_a_machine_has_no_share(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    bill = bill_for_run(LocalProvider(tmp_path / "leases"), "r", ledger=ledger, now=NOW)

    assert waste_lines([bill], trained_seconds=0, repeated_seconds=0, idle_shares={}) == ()


def test_launches_of_one_run_are_taken_together(tmp_path):
    first, second = (
        make_bill(tmp_path / name, seconds=seconds) for name, seconds in [("a", 400), ("b", 600)]
    )

    lines = waste_lines([first, second], trained_seconds=900, repeated_seconds=0, idle_shares={})

    # By hand: 100 s of 1,000 s without steps, at 0.002 USD/s.
    last = waste_text(lines).splitlines()[-1]
    assert " ".join(last.split()) == "start-up, evaluation and teardown 0.200000 10.0%"
