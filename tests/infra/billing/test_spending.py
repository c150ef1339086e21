"""What a run costs by ledger, provider and steady clock; expected figures are worked by hand at 3.6 USD/hour."""

import shutil
from datetime import UTC, datetime, timedelta

import pytest

from heterps_core.cluster import Cluster, Node
from heterps_core.errors import ProvisioningError
from heterps_core.hardware import Market
from infra.billing.spending import PROVIDER_INTERVAL_S, SpendingMeter
from infra.ledger.ledger import EndReason, Ledger
from infra.ledger.ledger_entry import Instance, LaunchTerms
from infra.providers.local import LocalProvider
from tests.infra.builders import offer, plan

USD_PER_HOUR = 3.6
USD_PER_S = 0.001
MIDNIGHT = datetime(2026, 11, 20, tzinfo=UTC)
NODE = Node(
    node_id="stage0-node0",
    address="127.0.0.1",
    device_type="cpu-c7i",
    instance_type="c7i.large",
    market=Market.ON_DEMAND,
    stage=0,
    num_workers=1,
    price_usd_per_hour=USD_PER_HOUR,
    provider_instance_id="i-1",
)
TERMS = LaunchTerms(
    attempt=1,
    stage=0,
    device_type="cpu-c7i",
    market=Market.ON_DEMAND,
    region="us-east-1",
    price_usd_per_hour=USD_PER_HOUR,
    price_as_of="2026-11-20",
    price_source="test",
    intended_at=MIDNIGHT,
)


class World:
    """A provider whose machines, clock and answers are set by hand."""

    def __init__(self, tmp_path):
        self.steady_s = 1_000.0
        self.instances = ()
        self.problem = None
        self.path = tmp_path / "ledger.sqlite"
        self.ledger = Ledger(self.path)
        world = self

        class Cloud(LocalProvider):
            minimum_billed_s = 60.0

            def now(self):
                return MIDNIGHT + timedelta(seconds=world.steady_s - 1_000.0)

            def list_instances(self, run_id=None):
                if world.problem is not None:
                    raise world.problem
                return world.instances

        self.provider = Cloud(tmp_path / "leases")

    def launched(self, launch_id="r1", instance_id="i-1", *, after_s=0.0, host_is_behind=timedelta()):
        """Write a machine down as the provider dates it, and show it."""
        (request,) = plan(offer(price_usd_per_hour=USD_PER_HOUR)).node_requests()
        at = MIDNIGHT + timedelta(seconds=after_s)
        self.ledger.intend(launch_id, "local", request, at=at - host_is_behind)
        self.ledger.launched(launch_id, request.node_id, provider_instance_id=instance_id, at=at)
        self.show(launch_id, instance_id, after_s=after_s)

    def show(self, launch_id, instance_id, *, after_s=0.0):
        at = MIDNIGHT + timedelta(seconds=after_s)
        found = Instance(
            provider_instance_id=instance_id,
            run_id=launch_id,
            node_id=None,
            instance_type="c7i.large",
            launched_at=at,
            is_ended=False,
            ended_at=None,
            lease_until=None,
            is_owner_dead=False,
            terms=TERMS,
        )
        self.instances = (*self.instances, found)

    def meter(self, *, bucket_usd=0.0):
        cluster = Cluster(
            run_id="r1",
            provider="local",
            nodes=(NODE,),
            rendezvous="127.0.0.1:1",
            created_at=datetime.now(UTC).isoformat(),
        )
        return SpendingMeter(
            self.provider,
            cluster,
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


@pytest.mark.parametrize("is_provider_lost", [False, True])
def test_with_a_truncated_ledger_the_machines_count_on(world, is_provider_lost):
    world.launched()
    meter = world.meter()
    meter()
    world.truncate()
    if is_provider_lost:
        world.problem = ProvisioningError("no network")

    spending = world.after(meter, 3_600)

    assert spending.run_usd == spending.month_usd == usd(3_600)
    assert (spending.blind_because is not None) is is_provider_lost


def test_a_ledger_that_can_be_read_or_a_provider_that_answers_is_enough_to_see(world):
    world.launched()
    meter = world.meter()
    world.problem = ProvisioningError("no network")
    assert world.after(meter, PROVIDER_INTERVAL_S).blind_because is None
    whole = world.path.with_name("copy")
    shutil.copy(world.path, whole)
    world.truncate()
    blind = world.after(meter, 1)
    assert "malformed" in blind.blind_because
    assert "no network" in blind.blind_because
    shutil.copy(whole, world.path)
    assert world.after(meter, 1).blind_because is None


@pytest.mark.parametrize("behind", [timedelta(hours=2), timedelta(hours=-2)])
def test_a_clock_that_is_two_hours_off_changes_nothing(world, behind):
    world.launched(host_is_behind=behind)
    meter = world.meter()

    assert world.after(meter, 3_600).run_usd == usd(3_600)


def test_failed_launches_of_the_run_and_machines_that_only_the_provider_knows_are_counted(world):
    world.launched("r1.1", "i-failed", after_s=-1_000)
    world.ledger.ended(
        "r1.1", "stage0-node0", reason=EndReason.LAUNCH_FAILED, at=MIDNIGHT - timedelta(seconds=900)
    )
    world.instances = ()
    world.launched("r1.2", "i-1")
    world.show("r1.2", "i-unknown")
    world.show("another", "i-other")

    assert world.after(world.meter(), 600).run_usd == usd(100 + 600 + 600)


def test_a_machine_that_the_ledger_holds_for_ended_and_the_provider_lists_counts_on(world):
    world.launched()
    meter = world.meter()
    world.ledger.ended("r1", "stage0-node0", reason=EndReason.GONE, at=MIDNIGHT + timedelta(seconds=70))

    assert world.after(meter, 3_600).run_usd == usd(3_600)
    world.instances = ()
    assert world.after(meter, 3_600).run_usd == usd(3_600)


def test_the_month_keeps_what_a_rebuilt_ledger_has_lost(world):
    world.launched("before", "i-0", after_s=-7_200)
    world.ledger.ended("before", "stage0-node0", reason=EndReason.RUN_ENDED, at=MIDNIGHT - timedelta(hours=1))
    world.launched()
    meter = world.meter()
    assert world.after(meter, 60).month_usd == usd(3_600 + 60)
    world.path.unlink()

    assert world.after(meter, 60).month_usd == usd(3_600 + 120)


def test_a_provider_that_never_answers_does_not_stop_the_count(world, monkeypatch):
    monkeypatch.setattr("infra.billing.spending.ANSWER_WAIT_S", 0.01)
    world.launched()
    meter = world.meter()
    is_over = []

    def hang(run_id=None):
        while not is_over:
            pass
        return ()

    world.provider.list_instances = hang
    world.truncate()
    try:
        spending = world.after(meter, 3_600)
    finally:
        is_over.append(True)

    assert spending.run_usd == usd(3_600)
    assert "local has not answered" in spending.blind_because
