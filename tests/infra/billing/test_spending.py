"""The cost of a run by ledger and steady clock; expected figures are worked by hand at 3.6 USD/hour."""

from datetime import UTC, datetime, timedelta

import pytest

from infra.billing.spending import SpendingMeter
from infra.ledger.ledger import EndReason, Ledger
from infra.providers.local import LocalProvider
from tests.infra.builders import offer, plan

USD_PER_HOUR = 3.6
USD_PER_S = 0.001
MIDNIGHT = datetime(2026, 11, 20, tzinfo=UTC)


class World:
    """A provider and a ledger with a clock that is set by hand."""

    def __init__(self, tmp_path):
        self.steady_s = 1_000.0
        self.path = tmp_path / "ledger.sqlite"
        self.ledger = Ledger(self.path)
        world = self

        class Cloud(LocalProvider):
            minimum_billed_s = 60.0

            def now(self):
                return MIDNIGHT + timedelta(seconds=world.steady_s - 1_000.0)

        self.provider = Cloud(tmp_path / "leases")

    def launched(self, launch_id="r1", instance_id="i-1", *, after_s=0.0, host_is_behind=timedelta()):
        """Write a machine down as the provider dates it."""
        (request,) = plan(offer(price_usd_per_hour=USD_PER_HOUR)).node_requests()
        at = MIDNIGHT + timedelta(seconds=after_s)
        self.ledger.intend(launch_id, "local", request, at=at - host_is_behind)
        self.ledger.launched(launch_id, request.node_id, provider_instance_id=instance_id, at=at)

    def meter(self, *, bucket_usd=0.0):
        return SpendingMeter(
            self.provider,
            entries=lambda: Ledger(self.path).entries(),
            belongs=lambda launch_id: launch_id.partition(".")[0] == "r1",
            bucket_usd=bucket_usd,
            steady_s=lambda: self.steady_s,
        )

    def after(self, meter, seconds):
        self.steady_s += seconds
        return meter()

    def truncate(self):
        with self.path.open("r+b") as file:
            file.truncate(5_000)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def usd(seconds):
    """Of one machine; the wait for it to be up is some real milliseconds."""
    return pytest.approx(seconds * USD_PER_S, abs=0.01 * USD_PER_S * 60)


def test_a_machine_costs_its_first_minute_at_once_and_then_by_the_second(world):
    world.launched()
    meter = world.meter()

    assert [world.after(meter, seconds).run_usd for seconds in (1, 58, 1, 300)] == [
        usd(60),
        usd(60),
        usd(60),
        usd(360),
    ]


def test_what_the_run_will_pay_for_its_bucket_counts_from_the_start(world):
    world.launched()

    spending = world.meter(bucket_usd=2.5)()

    assert spending.run_usd == spending.month_usd
    assert spending.run_usd - 2.5 == usd(60)


def test_with_a_truncated_ledger_the_machines_count_on_and_one_that_is_rebuilt_counts_once(world):
    world.launched()
    meter = world.meter()
    whole = world.path.read_bytes()
    world.truncate()

    spending = world.after(meter, 3_600)
    world.path.write_bytes(whole)

    assert spending.run_usd == spending.month_usd == usd(3_600)
    assert world.after(meter, 60).run_usd == usd(3_660)


@pytest.mark.parametrize("behind", [timedelta(hours=2), timedelta(hours=-2)])
def test_a_clock_that_is_two_hours_off_changes_nothing(world, behind):
    world.launched(host_is_behind=behind)
    meter = world.meter()

    assert world.after(meter, 3_600).run_usd == usd(3_600)


def test_failed_launches_of_the_run_are_counted_and_machines_of_other_runs_are_not(world):
    world.launched("r1.1", "i-failed", after_s=-1_000)
    world.ledger.ended(
        "r1.1", "stage0-node0", reason=EndReason.LAUNCH_FAILED, at=MIDNIGHT - timedelta(seconds=900)
    )
    world.launched("r1.2", "i-1")
    world.launched("another", "i-other")

    assert world.after(world.meter(), 600).run_usd == usd(100 + 600)


def test_a_machine_costs_nothing_more_after_its_end(world):
    world.launched()
    meter = world.meter()
    world.ledger.ended("r1", "stage0-node0", reason=EndReason.GONE, at=MIDNIGHT + timedelta(seconds=70))

    assert world.after(meter, 3_600).run_usd == usd(70)


def test_the_month_keeps_what_a_rebuilt_ledger_has_lost(world):
    world.launched("before", "i-0", after_s=-7_200)
    world.ledger.ended("before", "stage0-node0", reason=EndReason.RUN_ENDED, at=MIDNIGHT - timedelta(hours=1))
    world.launched()
    meter = world.meter()
    assert world.after(meter, 60).month_usd == usd(3_600 + 60)
    world.path.unlink()

    assert world.after(meter, 60).month_usd == usd(3_600 + 120)
