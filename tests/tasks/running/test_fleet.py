"""When a fleet loses a machine, the others stay as they are, and another takes its place."""

from contextlib import ExitStack
from datetime import UTC, datetime

import psutil
import pytest

from heterps_core.errors import BudgetExceededError, ProvisioningError
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from heterps_core.plans.scheduling_plan import Stage
from infra.billing.caps import Caps
from infra.ledger.ledger import EndReason, EntryState, Ledger
from infra.machines.lifecycle import running_cluster
from infra.providers import provider_of
from infra.workspace import Workspace
from tasks.provisioning import Provisioning
from tasks.running import fleet as fleets
from tasks.running.fleet import Fleet, end_nodes, replaced
from tests.heterps_core.plans.test_provisioning_plan import group
from tests.infra.builders import bootstrap
from tests.tasks.builders import fleet_run

PURCHASE = ProvisioningPlan(
    replicas=(2, 1),
    groups=(group(0, count=2, units=1), group(1, count=1, units=1)),
    planned_price_usd_per_hour=3.0,
)

BOUGHT = Provisioning(
    cloud_plan=PURCHASE,
    launch_plan=PURCHASE,
    launch_stages=(Stage(0, 1, "cpu-c7i", 2), Stage(2, 3, "cpu-c7i", 1)),
    predicted_cost_usd=1.0,
    is_dry_run=True,
)


@pytest.fixture
def workspace(tmp_path):
    return Workspace(root=tmp_path).create()


@pytest.fixture
def provider(workspace):
    return provider_of(workspace, "local")


@pytest.fixture
def ledger(workspace):
    return Ledger(workspace.ledger_path)


@pytest.fixture
def fleet(workspace, provider, ledger, monkeypatch):
    """Three real processes that sleep; so do those that replace them."""
    sleeping = bootstrap(workspace.run_folder("r1"))
    monkeypatch.setattr(fleets.clusters, "node_bootstrap", lambda *args, **others: sleeping)
    with running_cluster(
        provider,
        PURCHASE,
        run_id="r1",
        bootstrap=sleeping,
        ledger=ledger,
        caps=Caps(),
        predicted_cost_usd=1.0,
    ) as cluster:
        yield Fleet(cluster, BOUGHT)


def replace_lost(workspace, fleet, *node_ids, **caps):
    return replaced(fleet_run(workspace, caps=Caps(**caps)), fleet, node_ids)


def pids_by_machine(provider):
    """Return the first process of each machine that the provider lists."""
    return {
        key: process.pid
        for process, key in sorted(provider._processes.tagged(), key=lambda found: -found[0].pid)
    }


def test_two_of_three_machines_stay_and_one_is_launched_in_the_place_of_the_lost(
    workspace, provider, ledger, fleet
):
    before = pids_by_machine(provider)

    with replace_lost(workspace, fleet, "stage0-node1") as following:
        after = pids_by_machine(provider)
        nodes, nodes_before = following.cluster.nodes, fleet.cluster.nodes
        assert following.cluster.generation == 2
        assert [node.node_id for node in nodes] == [node.node_id for node in nodes_before]
        assert [node is other for node, other in zip(nodes, nodes_before, strict=True)] == [
            True,
            False,
            True,
        ]
        kept = {("r1", "stage0-node0"), ("r1", "stage1-node0")}
        assert set(after) == kept | {("r1.2", "stage0-node1")}
        assert {key: after[key] for key in kept} == {key: before[key] for key in kept}
        [lost] = [entry for entry in ledger.entries() if entry.state is EntryState.ENDED]
        assert (lost.run_id, lost.node_id, lost.reason) == ("r1", "stage0-node1", EndReason.GONE)

    assert set(pids_by_machine(provider)) == kept
    assert not psutil.pid_exists(after["r1.2", "stage0-node1"])


def test_machines_are_lost_one_after_the_other_and_each_is_billed_for_its_own_time(workspace, ledger, fleet):
    with ExitStack() as launched:
        following = launched.enter_context(replace_lost(workspace, fleet, "stage1-node0"))
        following = launched.enter_context(replace_lost(workspace, following, "stage1-node0", "stage0-node0"))
        assert following.cluster.generation == 3

    entries = [entry for entry in ledger.entries() if entry.node_id == "stage1-node0"]
    assert [entry.run_id for entry in entries] == ["r1", "r1.2", "r1.3"]
    assert entries[0].ended_at <= entries[1].launched_at <= entries[1].ended_at <= entries[2].launched_at
    assert all(entry.ended_at <= datetime.now(UTC) for entry in entries)


def test_where_all_are_lost_nothing_is_replaced(workspace, fleet):
    everything = [node.node_id for node in fleet.cluster.nodes]

    with pytest.raises(ProvisioningError, match="no machine of the fleet is left"):
        replace_lost(workspace, fleet, *everything).__enter__()


def test_a_cap_by_the_hour_counts_the_machines_that_stay(workspace, provider, fleet):
    with pytest.raises(BudgetExceededError):
        replace_lost(workspace, fleet, "stage0-node1", max_usd_per_hour=2.5).__enter__()

    assert {key[0] for key in pids_by_machine(provider)} == {"r1"}


def test_a_fleet_that_shrank_can_lose_and_replace_another_machine(workspace, provider, ledger, fleet):
    smaller = fleet.without(["stage0-node0"])
    end_nodes(fleet_run(workspace), fleet.cluster, ["stage0-node0"])

    assert [stage.num_replicas for stage in smaller.bought.launch_stages] == [1, 1]
    assert set(pids_by_machine(provider)) == {("r1", "stage0-node1"), ("r1", "stage1-node0")}
    [closed] = [entry for entry in ledger.entries() if entry.ended_at is not None]
    assert (closed.node_id, closed.reason) == ("stage0-node0", EndReason.GONE)
    with replace_lost(workspace, smaller, "stage0-node1") as following:
        assert [node.node_id for node in following.cluster.nodes] == ["stage0-node1", "stage1-node0"]
        assert following.cluster.generation == 2
        assert set(pids_by_machine(provider)) == {("r1.2", "stage0-node1"), ("r1", "stage1-node0")}
