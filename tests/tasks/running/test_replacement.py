"""Of a fleet that loses a machine the others stay as they are, and one takes its place."""

from contextlib import ExitStack
from datetime import UTC, datetime

import psutil
import pytest

from heterps_core.errors import BudgetExceededError, ProvisioningError
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.outcome import MachinesLost
from heterps_core.training.storage.run_directory import RunDirectory
from infra.billing.caps import Caps
from infra.ledger.ledger import EndReason, EntryState, Ledger
from infra.machines.lifecycle import running_cluster
from infra.providers import provider_of
from infra.workspace import Workspace
from tasks.provisioning import Provisioning
from tasks.running import replacement
from tasks.running.replacement import (
    end_nodes,
    replaced_machines,
    smaller,
)
from tests.heterps_core.plans.test_provisioning_plan import group
from tests.infra.builders import bootstrap

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
    sleeping = bootstrap(workspace.run_directory("r1"))
    monkeypatch.setattr(replacement, "node_bootstrap", lambda *args, **others: sleeping)
    with running_cluster(
        provider,
        PURCHASE,
        run_id="r1",
        bootstrap=sleeping,
        ledger=ledger,
        caps=Caps(),
        predicted_cost_usd=1.0,
    ) as cluster:
        yield cluster


def replace_lost(workspace, cluster, *node_ids, is_noticed=False, bought=BOUGHT, **caps):
    return replaced_machines(
        workspace,
        cluster,
        MachinesLost(message="lost", node_ids=node_ids, is_noticed=is_noticed),
        bought,
        run_id="r1",
        run_directory=RunDirectory(str(workspace.run_directory("r1"))),
        model="ctrdnn",
        caps=Caps(**caps),
    )


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

    with replace_lost(workspace, fleet, "stage0-node1") as cluster:
        after = pids_by_machine(provider)
        assert cluster.generation == 2
        assert [node.node_id for node in cluster.nodes] == [node.node_id for node in fleet.nodes]
        assert [node is other for node, other in zip(cluster.nodes, fleet.nodes, strict=True)] == [
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
        cluster = launched.enter_context(replace_lost(workspace, fleet, "stage1-node0"))
        cluster = launched.enter_context(replace_lost(workspace, cluster, "stage1-node0", "stage0-node0"))
        assert cluster.generation == 3

    entries = [entry for entry in ledger.entries() if entry.node_id == "stage1-node0"]
    assert [entry.run_id for entry in entries] == ["r1", "r1.2", "r1.3"]
    assert entries[0].ended_at <= entries[1].launched_at <= entries[1].ended_at <= entries[2].launched_at
    assert all(entry.ended_at <= datetime.now(UTC) for entry in entries)


def test_a_machine_with_a_notice_is_the_clouds_to_end_until_another_is_up(
    workspace, provider, ledger, fleet, monkeypatch
):
    end_instance, launched = provider.terminate_instance, []

    def end_and_note(self, instance):
        launched.append(len(provider.list_instances("r1.2")))
        end_instance(instance)

    monkeypatch.setattr(type(provider), "terminate_instance", end_and_note)
    with replace_lost(workspace, fleet, "stage0-node1", is_noticed=True):
        pass

    assert launched == [1]
    [lost] = [entry for entry in ledger.entries() if entry.run_id == "r1" and entry.node_id == "stage0-node1"]
    assert lost.reason == EndReason.GONE


def test_where_all_are_lost_nothing_is_replaced(workspace, fleet):
    everything = [node.node_id for node in fleet.nodes]

    with pytest.raises(ProvisioningError, match="no machine of the fleet is left"):
        replace_lost(workspace, fleet, *everything).__enter__()


def test_a_cap_by_the_hour_counts_the_machines_that_stay(workspace, provider, fleet):
    with pytest.raises(BudgetExceededError):
        replace_lost(workspace, fleet, "stage0-node1", max_usd_per_hour=2.5).__enter__()

    assert {key[0] for key in pids_by_machine(provider)} == {"r1"}


def test_a_fleet_that_shrank_can_lose_and_replace_another_machine(workspace, provider, ledger, fleet):
    lost = MachinesLost(message="lost", node_ids=("stage0-node0",))
    bought = smaller(BOUGHT, fleet, lost.node_ids)
    end_nodes(workspace, fleet, lost.node_ids, run_id="r1", reason=EndReason.GONE)
    cluster = fleet.next_generation(without=lost.node_ids)

    assert [stage.num_replicas for stage in bought.launch_stages] == [1, 1]
    assert set(pids_by_machine(provider)) == {("r1", "stage0-node1"), ("r1", "stage1-node0")}
    [closed] = [entry for entry in ledger.entries() if entry.ended_at is not None]
    assert (closed.node_id, closed.reason) == ("stage0-node0", EndReason.GONE)
    with replace_lost(workspace, cluster, "stage0-node1", bought=bought) as following:
        assert [node.node_id for node in following.nodes] == ["stage0-node1", "stage1-node0"]
        assert following.generation == 3
        assert set(pids_by_machine(provider)) == {("r1.2", "stage0-node1"), ("r1", "stage1-node0")}
