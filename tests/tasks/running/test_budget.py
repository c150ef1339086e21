from datetime import UTC, datetime, timedelta

import pytest

from heterps_core.errors import BudgetExceededError, TrainingError
from heterps_core.training.outcome import MachinesLost
from heterps_core.training.storage.run_directory import STOP, RunDirectory
from heterps_core.training.storage.store import StorageUsage
from infra.billing.caps import Caps
from infra.ledger.ledger import EndReason, Ledger
from infra.machines.lifecycle import running_cluster
from infra.providers import provider_of
from infra.workspace import Workspace
from tasks.clusters import bills_of_run, keep_storage_usage, local_folder
from tasks.running.budget import check_not_stopped, spending_of, within_budget
from tests.infra.builders import bootstrap, offer, plan
from tests.tasks.builders import fleet_run
from tests.waiting import wait_for

USD_PER_SECOND = 1.0


@pytest.fixture
def workspace(tmp_path):
    return Workspace(root=tmp_path).create()


@pytest.fixture
def run(workspace):
    """A real process that sleeps, at a list price of 1 USD a second."""
    with running_cluster(
        provider_of(workspace, "local"),
        plan(offer(price_usd_per_hour=3600 * USD_PER_SECOND)),
        run_id="r1",
        bootstrap=bootstrap(workspace.run_folder("r1")),
        ledger=Ledger(workspace.ledger_path),
        caps=Caps(),
        predicted_cost_usd=1.0,
    ) as cluster:
        yield cluster


def train_like_a_worker_that_hangs(workspace, run, caps):
    """Wait for the stop that it is asked for, and do not obey."""
    directory = RunDirectory(str(workspace.run_folder("r1")))
    provider = provider_of(workspace, "local")
    with within_budget(fleet_run(workspace, caps=caps), run, bucket_usd=0.0) as watch:
        wait_for(lambda: directory.exists(STOP))
        assert provider.list_instances("r1")
        wait_for(lambda: not provider.list_instances("r1"))
        wait_for(lambda: watch.has_ended_machines)
        raise TrainingError("stage0-node0 has been silent")


def test_a_run_is_asked_to_stop_before_the_cap_and_loses_its_machines_at_it(workspace, run):
    with pytest.raises(BudgetExceededError, match=r"of the 2 USD per run are spent: its machines were ended"):
        train_like_a_worker_that_hangs(workspace, run, Caps(max_usd_per_run=2 * USD_PER_SECOND))


def test_an_error_within_the_budget_is_left_as_it_is(workspace, run):
    with (
        pytest.raises(TrainingError, match="silent"),
        within_budget(fleet_run(workspace, caps=Caps(max_usd_per_run=1e6)), run, bucket_usd=0.0) as watch,
    ):
        raise TrainingError("stage0-node0 has been silent")

    check_not_stopped(watch, MachinesLost(message="stage0-node0 is lost"), run_id="r1")


def test_a_loss_after_a_cap_that_was_reached_is_no_reason_to_go_on(workspace, run):
    caps = Caps(max_usd_per_run=1e6)
    with within_budget(fleet_run(workspace, caps=caps), run, bucket_usd=0.0) as watch:
        watch.stopped_by = "4 of the 4 USD per run are spent"

    with pytest.raises(BudgetExceededError, match=r"4 of the 4 USD.*resume_run_id=r1.*stage0-node0 is lost"):
        check_not_stopped(watch, MachinesLost(message="stage0-node0 is lost"), run_id="r1")


def test_the_launches_of_a_run_are_added_up(workspace):
    ledger = Ledger(workspace.ledger_path)
    now = datetime.now(UTC)
    (request,) = plan(offer(price_usd_per_hour=3600.0)).node_requests()
    for launch_id in ("r1", "r1.2", "other"):
        ledger.intend(launch_id, "local", request, at=now)
        ledger.launched(launch_id, request.node_id, provider_instance_id=launch_id, at=now)

    spending = spending_of(workspace, "local", "r1", now=now.replace(microsecond=now.microsecond))
    later = spending_of(workspace, "local", "r1", now=datetime.fromtimestamp(now.timestamp() + 10, UTC))

    assert (spending.run_usd, later.run_usd) == (0.0, pytest.approx(20.0))


@pytest.mark.parametrize("provider", ["local", "aws"])
def test_what_is_held_against_the_caps_is_what_the_bill_will_say(workspace, provider):
    ledger = Ledger(workspace.ledger_path)
    ended_at = datetime.now(UTC)
    began_at = ended_at - timedelta(hours=1)
    for request in plan(*[offer(price_usd_per_hour=0.0893)] * 10).node_requests():
        ledger.intend("r1", provider, request, at=began_at)
        ledger.launched("r1", request.node_id, provider_instance_id=request.node_id, at=began_at)
        ledger.ended("r1", request.node_id, reason=EndReason.RUN_ENDED, at=ended_at)

    # Every machine asks the bucket for six heartbeats and two looks at the lease a minute.
    usage = StorageUsage(put_requests=10 * 360, get_requests=10 * 120)
    keep_storage_usage(workspace, "r1", local_folder(workspace, "r1"), cluster=None, of_nodes=usage)

    spending = spending_of(workspace, provider, "r1", now=ended_at)

    # By hand: ten hours at 0.0893 USD, on AWS with an address and 40 GB of disk at 0.08 USD a month of 730 h.
    services_usd = {"local": 0.0, "aws": 10 * (0.005 + 40 * 0.08 / 730 + 0.001848)}[provider]
    assert spending.run_usd == pytest.approx(0.893 + services_usd)
    assert spending.run_usd == pytest.approx(
        sum(bill.total_usd for bill in bills_of_run(workspace, provider, "r1"))
    )
