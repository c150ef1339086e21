import signal
import threading
import time
from contextlib import nullcontext
from datetime import timedelta

import pytest

from heterps_core.errors import BudgetExceededError, ProvisioningError
from infra.billing.caps import Caps
from infra.ledger.ledger import Ledger
from infra.machines.lifecycle import _node_lifetime_s, running_cluster, terminate_run
from infra.providers.local import LocalProvider
from tests.infra.builders import bootstrap, plan
from tests.waiting import wait_for

SIX_HOURS_S = 6 * 3600


class ShortLeaseProvider(LocalProvider):
    """The local provider with a lease that must be renewed while the test looks."""

    lease_s = 0.6


class StubbornProvider(LocalProvider):
    """The local provider whose first attempts to end a run fail, as on a throttled account."""

    failures_left = 0

    def terminate(self, run_id):
        if self.failures_left > 0:
            self.failures_left -= 1
            raise ProvisioningError("throttled")
        return super().terminate(run_id)


class InterruptedProvider(LocalProvider):
    """The local provider that is asked to end in the middle of ending."""

    def terminate(self, run_id):
        signal.raise_signal(signal.SIGTERM)
        return super().terminate(run_id)


class ChargingProvider(LocalProvider):
    """The local provider as if each machine had an address and a disk of 40 GB that are paid for."""

    is_dry_run = False
    charges_services = True
    disk_gb_each = 40.0


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ledger.sqlite")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr("infra.machines.lifecycle.TERMINATE_PAUSE_S", 0.01)


def running(provider, ledger, tmp_path):
    return running_cluster(
        provider,
        plan(),
        run_id="r1",
        bootstrap=bootstrap(tmp_path / "run"),
        ledger=ledger,
        caps=Caps(),
        predicted_cost_usd=1.0,
    )


def leases(provider):
    return [instance.lease_until for instance in provider.list_instances("r1")]


def test_the_lease_is_renewed_while_the_block_runs_and_no_longer(ledger, tmp_path):
    provider = ShortLeaseProvider(tmp_path / "leases")

    with running(provider, ledger, tmp_path):
        first = leases(provider)
        wait_for(lambda: min(leases(provider)) > max(first), what="a renewal of both")
        assert len(first) == 2

    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lease of")]


def test_the_lease_changes_where_nodes_look_while_the_block_runs_and_no_longer(ledger, tmp_path):
    provider = ShortLeaseProvider(tmp_path / "leases")
    lease = tmp_path / "run" / "leases" / "r1"

    with running(provider, ledger, tmp_path):
        wait_for(lease.exists, what="the first lease")
        first = lease.read_text()
        wait_for(lambda: lease.read_text() != first, what="a renewal")

    last = lease.read_text()
    time.sleep(2 * provider.lease_s)
    assert lease.read_text() == last


def test_machines_of_a_launch_that_takes_longer_than_a_lease_keep_theirs(ledger, tmp_path):
    lease = tmp_path / "run" / "leases" / "r1"

    class SlowProvider(ShortLeaseProvider):
        def launch(self, plan, **wanted):
            cluster = super().launch(plan, **wanted)
            born = leases(self)
            wait_for(lambda: lease.exists() and min(leases(self)) > max(born), what="a renewal")
            return cluster

    with running(SlowProvider(tmp_path / "leases"), ledger, tmp_path) as cluster:
        assert len(cluster.nodes) == 2


def test_a_lease_that_cannot_be_renewed_on_the_machines_is_renewed_where_nodes_look(ledger, tmp_path):
    class SilentProvider(ShortLeaseProvider):
        def renew_lease(self, run_id, *, until):
            raise ProvisioningError("EC2 does not answer")

    lease = tmp_path / "run" / "leases" / "r1"
    with running(SilentProvider(tmp_path / "leases"), ledger, tmp_path):
        wait_for(lease.exists, what="the first lease")
        first = lease.read_text()
        wait_for(lambda: lease.read_text() != first, what="a renewal")


def test_nodes_that_are_paid_for_are_reported_to_end_at_twice_the_plan(ledger, tmp_path):
    reported = []

    class Told(ChargingProvider):
        def launch(self, plan, *, bootstrap, **named):
            reported.append(bootstrap.lifetime_s)
            return super().launch(plan, bootstrap=bootstrap, **named)

    provider = Told(tmp_path / "leases")
    for run_id, usd, run_caps in [
        ("r1", 0.01, Caps()),
        ("r2", 1.0, Caps()),
        ("r3", 1.0, Caps(max_usd_per_run=1.2)),
    ]:
        with running_cluster(
            provider,
            plan(),
            run_id=run_id,
            bootstrap=bootstrap(tmp_path / run_id, lifetime_s=SIX_HOURS_S),
            ledger=ledger,
            caps=run_caps,
            predicted_cost_usd=usd,
        ):
            pass

    # By hand: 0.26 USD an hour and twice (0.005 for an address + 40 GB at 0.08 USD a month of 730 h + 0.00185 for
    # the bucket) are 0.28246. 0.01 USD are 127 s, and a fleet is waited for 900 s; 1 USD is 3.540 h, twice that above
    # 6 h; 1.2 USD 4.248 h.
    assert reported == [900, SIX_HOURS_S, int(1.2 / (0.26 + 2 * (0.005 + 40 * 0.08 / 730 + 0.001848)) * 3600)]


def test_a_failed_attempt_to_end_is_repeated(ledger, tmp_path):
    provider = StubbornProvider(tmp_path / "leases")
    provider.failures_left = 2

    with running(provider, ledger, tmp_path):
        pass

    assert provider.list_instances() == ()


def test_says_that_the_lease_is_the_last_resort_when_nothing_can_be_ended(ledger, tmp_path):
    provider = StubbornProvider(tmp_path / "leases")
    with running(provider, ledger, tmp_path):
        provider.failures_left = 3
        with pytest.raises(
            ProvisioningError, match=r"3 attempts failed: throttled; the sweeper ends them .*60 s"
        ):
            terminate_run(provider, "r1", ledger=ledger)

    assert provider.list_instances() == ()


def test_a_signal_during_teardown_waits_until_everything_has_ended(ledger, tmp_path):
    provider = InterruptedProvider(tmp_path / "leases")

    with pytest.raises(SystemExit) as caught, running(provider, ledger, tmp_path):
        pass

    assert caught.value.code == 128 + signal.SIGTERM
    assert provider.list_instances() == ()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_that_someone_else_set_is_left_alone(ledger, tmp_path):
    def others_handler(signum, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGTERM, others_handler)
    try:
        with pytest.raises(TimeoutError), running(LocalProvider(tmp_path / "leases"), ledger, tmp_path):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)

    assert LocalProvider(tmp_path / "leases").list_instances() == ()


def test_works_in_a_thread_where_no_signal_can_be_handled(ledger, tmp_path):
    seen = []

    def run():
        with running(LocalProvider(tmp_path / "leases"), ledger, tmp_path) as cluster:
            seen.append(len(cluster.nodes))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert seen == [2]
    assert LocalProvider(tmp_path / "leases").list_instances() == ()


def test_a_lease_is_in_the_future_from_the_first_moment(ledger, tmp_path):
    provider = LocalProvider(tmp_path / "leases")

    with running(provider, ledger, tmp_path):
        (first, _) = provider.list_instances("r1")
        assert first.lease_until - first.launched_at > timedelta(seconds=provider.lease_s - 5)


@pytest.mark.parametrize(("cap", "is_refused"), [(0.28, True), (0.29, False)])
def test_disks_and_addresses_count_against_the_price_of_an_hour(ledger, tmp_path, cap, is_refused):
    # By hand: machines of 0.09 and 0.17 USD/hour, each with 0.005 for an address, 40 GB at 0.08 USD a month and
    # 0.00185 for heartbeats and looks at the lease.
    assert pytest.approx(0.28246, abs=1e-5) == 0.09 + 0.17 + 2 * (0.005 + 40 * 0.08 / 730 + 0.001848)
    refused = pytest.raises(BudgetExceededError, match="USD per hour") if is_refused else nullcontext()

    with (
        refused,
        running_cluster(
            ChargingProvider(tmp_path / "leases"),
            plan(),
            run_id="r1",
            bootstrap=bootstrap(tmp_path / "run"),
            ledger=ledger,
            caps=Caps(max_usd_per_hour=cap),
            predicted_cost_usd=1.0,
        ),
    ):
        pass

    assert bool(ledger.entries()) is not is_refused


@pytest.mark.parametrize(
    ("planned_s", "caps", "lifetime_s"),
    [
        # By hand, at 3 USD an hour: twice 20 minutes; 1.5 USD are half an hour, 0.5 USD ten minutes.
        (1200, Caps(), 2400),
        (1200, Caps(max_usd_per_run=1.5), 1800),
        (1200, Caps(max_usd_per_month=1.5, max_usd_per_run=30.0), 1800),
        (1200, Caps(max_usd_per_run=0.5), 600),
        (1200, Caps(max_usd_per_hour=0.5), 2400),
        (5 * 3600, Caps(), SIX_HOURS_S),
        # However short the plan: five minutes to run and ten to meet.
        (10, Caps(), 900),
        (10, Caps(max_usd_per_run=0.5), 600),
    ],
)
def test_a_node_lives_six_hours_or_twice_its_plan_or_what_its_cap_pays_whichever_is_least(
    planned_s, caps, lifetime_s
):
    found = _node_lifetime_s(
        longest_s=SIX_HOURS_S, planned_s=planned_s, start_s=900.0, price_usd_per_hour=3.0, caps=caps
    )

    assert found == lifetime_s
