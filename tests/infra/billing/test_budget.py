import time
from datetime import UTC, datetime, timedelta

import pytest

from infra.billing.budget import BudgetWatch, Spending, spent_usd, start_of_month, watched
from infra.billing.caps import Caps
from infra.ledger.ledger import EndReason, Ledger
from infra.providers.aws.provider import AwsEc2Provider
from infra.providers.local import LocalProvider
from tests.infra.builders import offer, plan
from tests.waiting import wait_for

NOW = datetime(2026, 11, 2, tzinfo=UTC)


class Run:
    """A run whose spending is set by hand; writes down its orders."""

    def __init__(self, caps, price_usd_per_hour=6.0):
        self.spending = Spending(run_usd=0.0, month_usd=0.0)
        self.reported = []
        self.watch = BudgetWatch(
            caps=caps,
            spending=lambda: self.spending,
            price_usd_per_hour=price_usd_per_hour,
            on_warning=lambda text: self.reported.append(text.partition(";")[0]),
            on_stop=lambda: self.reported.append("stop"),
            on_end=lambda: self.reported.append("end"),
        )

    def spend(self, run_usd, month_usd=0.0):
        self.spending = Spending(run_usd=run_usd, month_usd=month_usd)
        self.reported.clear()
        self.watch.look()
        self.watch.look()
        return list(self.reported)


def test_warns_at_80_percent_stops_before_the_cap_and_ends_the_machines_at_it_each_once():
    # 6 USD/hour are 0.1 USD a minute: the reserve of a minute is less than 5 % of 10 USD.
    run = Run(Caps(max_usd_per_run=10.0))

    assert run.spend(7.99) == []
    assert run.spend(8.0) == ["8 of the 10 USD per run are spent (80%)"]
    assert run.spend(9.89) == []
    assert run.spend(9.91) == ["stop"]
    assert run.spend(10.0) == ["end"]
    assert run.spend(11.0) == []
    assert run.watch.stopped_by == "9.91 of the 10 USD per run are spent"


def test_a_small_cap_keeps_a_twentieth_in_reserve():
    run = Run(Caps(max_usd_per_run=0.1))

    assert "stop" not in run.spend(0.0949)
    assert run.spend(0.0951) == ["stop"]


def test_the_month_has_a_cap_of_its_own():
    run = Run(Caps(max_usd_per_run=100.0, max_usd_per_month=50.0))

    assert run.spend(1.0, month_usd=41.0) == ["41 of the 50 USD per month are spent (82%)"]
    assert run.spend(1.0, month_usd=50.0) == ["stop", "end"]


def test_a_run_without_caps_is_left_alone():
    assert Run(Caps()).spend(1e9, month_usd=1e9) == []


def test_an_end_that_fails_is_tried_again():
    run = Run(Caps(max_usd_per_run=1.0))
    attempts = []

    def end():
        attempts.append(len(attempts))
        if len(attempts) == 1:
            raise OSError("the cloud does not answer")

    run.watch.on_end = end
    run.spending = Spending(run_usd=2.0, month_usd=0.0)
    with watched(run.watch, interval_s=0.01):
        wait_for(lambda: len(attempts) >= 2)
        time.sleep(0.05)

    assert attempts == [0, 1]


def test_a_stop_that_cannot_be_asked_for_is_tried_again_and_does_not_keep_the_end_away():
    run = Run(Caps(max_usd_per_run=1.0))
    stop = run.watch.on_stop

    def refuse():
        raise OSError("the bucket does not answer")

    run.watch.on_stop = refuse
    assert run.spend(2.0)[-1:] == ["end"]
    run.watch.on_stop = stop
    assert run.spend(0.96) == []
    other = Run(Caps(max_usd_per_run=1.0))
    other.watch.on_stop = refuse
    assert "stop" not in other.spend(0.96)
    other.watch.on_stop = lambda: other.reported.append("stop")
    assert other.spend(0.96) == ["stop"]


@pytest.fixture
def entries(tmp_path):
    """One machine of 3.6 USD/hour (0.001 USD/s) from an hour before midnight to an hour after, one never had."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    expensive = offer(price_usd_per_hour=3.6)
    had, never_had = plan(expensive, expensive).node_requests()
    midnight = datetime(2026, 11, 1, tzinfo=UTC)
    for request in (had, never_had):
        ledger.intend("r", "aws", request, at=midnight - timedelta(hours=1))
    ledger.launched("r", had.node_id, provider_instance_id="i", at=midnight - timedelta(hours=1))
    ledger.ended("r", had.node_id, reason=EndReason.RUN_ENDED, at=midnight + timedelta(hours=1))
    ledger.failed("r", never_had.node_id, reason="no capacity", at=midnight)
    return ledger.entries()


def test_a_machine_that_ran_over_the_turn_of_the_month_counts_by_parts(entries):
    all_of_it = spent_usd(entries, LocalProvider, now=NOW)
    november = spent_usd(entries, LocalProvider, now=NOW, since=start_of_month(NOW))

    assert (all_of_it, november) == (pytest.approx(7.2), pytest.approx(3.6))


def test_what_ended_before_the_month_began_is_not_of_it(entries):
    december = start_of_month(datetime(2026, 12, 24, tzinfo=UTC))

    assert spent_usd(entries, AwsEc2Provider, now=december, since=december) == 0.0


def test_each_hour_of_a_machine_has_its_disk_and_address_and_one_that_was_never_had_has_none(entries):
    # By hand: two hours of one machine at 3.60 USD, 0.005 for an address, 40 GB of 730 hours at 0.08, 360 writes at
    # 0.005 a thousand and 120 reads at 0.0004.
    services = 0.005 + 40 * 0.08 / 730 + 0.36 * 0.005 + 0.12 * 0.0004
    assert spent_usd(entries, AwsEc2Provider, now=NOW) == pytest.approx(2 * (3.6 + services))
