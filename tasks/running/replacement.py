"""A fleet of other machines: in place of lost ones, where only the difference is bought, or nothing; or of all."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from heterps_core.cluster import Cluster, Node
from heterps_core.errors import ProvisioningError
from heterps_core.hardware import Market
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from heterps_core.training.node.node_life import HEARTBEAT, LEAVING, node_key
from heterps_core.training.outcome import MachinesLost
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.units import ratio
from infra.billing.caps import Caps
from infra.ledger.ledger import EndReason, Ledger
from infra.machines.failover import first_running_cluster
from infra.providers import provider_of
from infra.workspace import Workspace
from tasks.clusters import ledger_entries, next_launch_id, node_bootstrap, spent_before_launch
from tasks.provisioning import Provisioning


@contextmanager
def replaced_machines(
    workspace: Workspace,
    cluster: Cluster,
    lost: MachinesLost,
    provisioning: Provisioning,
    *,
    run_id: str,
    run_directory: RunDirectory,
    model: str,
    caps: Caps,
) -> Iterator[Cluster]:
    """Launch what takes the places of lost machines, yield the cluster of the next generation, end them at last.

    A machine that was lost without notice is ended before, in case that it lives; one with a notice when the others
    are up: the cloud has mostly ended it by then, and does not charge its first hour.

    Raises:
        BudgetExceededError: A cap is exceeded.
        ProvisioningError: Nothing is left to be kept, or the machines cannot be had, or the lost ones not be ended.
    """
    kept = [node for node in cluster.nodes if node.node_id not in lost.node_ids]
    if not kept:
        raise ProvisioningError("no machine of the fleet is left to be kept")
    plans = [plan.only(lost.node_ids) for plan in plans_of_fleet(provisioning, cluster)]
    if not lost.is_noticed:
        end_nodes(workspace, cluster, lost.node_ids, run_id=run_id, reason=EndReason.GONE)
    forget_lost(run_directory, lost)
    share = ratio(plans[0].price_usd_per_hour, provisioning.launch_plan.price_usd_per_hour, otherwise=1.0)
    with _launched_beside(
        workspace,
        cluster.provider,
        kept,
        plans,
        run_id=run_id,
        run_directory=run_directory,
        model=model,
        caps=caps,
        predicted_cost_usd=provisioning.predicted_cost_usd * share,
    ) as launched:
        if lost.is_noticed:
            end_nodes(workspace, cluster, lost.node_ids, run_id=run_id, reason=EndReason.GONE)
        yield cluster.next_generation({node.node_id: node for node in launched.nodes})


def _launched_beside(
    workspace: Workspace,
    provider_name: str,
    kept: Sequence[Node],
    plans: Sequence[ProvisioningPlan],
    *,
    run_id: str,
    run_directory: RunDirectory,
    model: str,
    caps: Caps,
    predicted_cost_usd: float,
) -> AbstractContextManager[Cluster]:
    """Launch the first of some purchases that can be had beside machines that live; see `first_running_cluster`."""
    provider = provider_of(workspace, provider_name)
    ledger = Ledger(workspace.ledger_path)
    if caps.max_usd_per_hour is not None:
        kept_usd_per_hour = sum(node.price_usd_per_hour + node.disk_usd_per_hour for node in kept)
        caps = replace(caps, max_usd_per_hour=max(caps.max_usd_per_hour - kept_usd_per_hour, 0.0))
    return first_running_cluster(
        provider,
        plans,
        new_launch_id=lambda: next_launch_id(ledger, run_id),
        bootstrap=node_bootstrap(provider_name, run_directory, model=model),
        ledger=ledger,
        caps=caps,
        predicted_cost_usd=predicted_cost_usd,
        spent=lambda: spent_before_launch(provider, ledger, run_id),
    )


def smaller(provisioning: Provisioning, cluster: Cluster, lost_ids: Collection[str]) -> Provisioning:
    """Return what a fleet is without lost machines.

    Raises:
        ProvisioningError: It cannot train: a stage would have no machine, or workers would meet at one on spot, whose
            loss ends a run.
    """
    kept = [node for node in cluster.nodes if node.node_id not in lost_ids]
    left = {node.stage for node in kept}
    empty = [index for index in range(len(provisioning.launch_stages)) if index not in left]
    if empty:
        raise ProvisioningError(
            f"each of {len(provisioning.launch_stages)} stages needs a machine, but stage {empty[0]} would have none"
        )
    if all(node.market is Market.SPOT for node in kept):
        raise ProvisioningError("workers must meet at a machine on-demand, but all that stay are on spot")
    kept_ids = [node.node_id for node in kept]
    plan, *fallback_plans = [plan.only(kept_ids) for plan in plans_of_fleet(provisioning, cluster)]
    stages = zip(provisioning.launch_stages, plan.replicas, strict=True)
    return replace(
        provisioning,
        launch_plan=plan,
        fallback_plans=tuple(fallback_plans),
        launch_stages=tuple(replace(stage, num_replicas=count) for stage, count in stages),
    )


def plans_of_fleet(provisioning: Provisioning, cluster: Cluster) -> list[ProvisioningPlan]:
    """Return the purchases by which the machines of a cluster may have been launched, at least one.

    Raises:
        ProvisioningError: There is none.
    """
    bought = (provisioning.launch_plan, *provisioning.fallback_plans)
    plans = [plan for plan in bought if _is_plan_of(plan, cluster.nodes)]
    if not plans:
        raise ProvisioningError("the fleet must be of a known plan, so that a part of it can be bought again")
    return plans


def forget_lost(run_directory: RunDirectory, lost: MachinesLost) -> None:
    """Delete the signs of life and notices of lost machines; others may take their places under the same names."""
    for node_id in lost.node_ids:
        for name in (HEARTBEAT, LEAVING):
            run_directory.delete_file(node_key(node_id, name))


def _is_plan_of(plan: ProvisioningPlan, nodes: Sequence[Node]) -> bool:
    """Tell whether machines may have been launched by a plan."""
    requests = {request.node_id: request for request in plan.node_requests()}
    return len(requests) == len(nodes) and all(
        node.node_id in requests
        and node.num_workers == requests[node.node_id].num_workers
        and any(
            (offer.instance_type.name, offer.market) == (node.instance_type, node.market)
            for offer in (requests[node.node_id].offer, *requests[node.node_id].alternatives)
        )
        for node in nodes
    )


def end_nodes(
    workspace: Workspace, cluster: Cluster, node_ids: Collection[str], *, run_id: str, reason: EndReason
) -> None:
    """End machines of a cluster that has others to go on with, as far as they are there; close them in the books.

    Raises:
        ProvisioningError: One could not be ended.
    """
    provider, ledger = provider_of(workspace, cluster.provider), Ledger(workspace.ledger_path)
    ids = {node.provider_instance_id for node in cluster.nodes if node.node_id in node_ids}
    of_run = ledger_entries(workspace, run_id)
    entries = [entry for entry in of_run if entry.ended_at is None and entry.provider_instance_id in ids]
    for launch_id in sorted({entry.run_id for entry in entries}):
        for instance in provider.list_instances(launch_id):
            if instance.provider_instance_id in ids:
                provider.terminate_instance(instance)
    for entry in entries:
        ledger.ended(entry.run_id, entry.node_id, reason=reason, at=provider.now())
