"""The machines of a run with their purchase: how they are launched, replaced and terminated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime

from heterps_core.cluster import Cluster, Node
from heterps_core.errors import ProvisioningError
from heterps_core.hardware import Market
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from heterps_core.training.node.node_life import HEARTBEAT, LEAVING, node_key
from heterps_core.training.outcome import MachinesLost
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.units import ratio
from infra.billing.caps import Caps
from infra.ledger.ledger import EndReason, Ledger
from infra.machines.failover import first_running_cluster
from infra.providers import Provider, get_provider, provider_of
from infra.workspace import Workspace
from tasks import clusters
from tasks.planning.deadline import Deadline
from tasks.provisioning import Provisioning

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetRun:
    """A planned run, as the code that changes its machines needs to know it."""

    workspace: Workspace
    run_id: str
    directory: RunDirectory
    provider_name: str
    region: str
    """In which its machines are."""

    model: str
    caps: Caps
    problem: SchedulingProblem
    """The planning problem of the whole run."""

    num_steps: int
    deadline: Deadline | None = None
    max_restarts_per_hour: int | None = None
    write_job: Callable[[Provisioning], object] = lambda _: None
    """Writes the job for the machines of another purchase, while the nodes wait for their next generation."""

    @property
    def provider(self) -> Provider:
        """The provider of its machines."""
        return provider_of(self.workspace, self.provider_name, region=self.region)

    @property
    def is_dry_run(self) -> bool:
        """This machine stands for those of the plan."""
        return get_provider(self.provider_name).is_dry_run


@dataclass(frozen=True, slots=True)
class Fleet:
    """Machines, and the purchase by which they were launched."""

    cluster: Cluster
    bought: Provisioning

    @property
    def plans(self) -> list[ProvisioningPlan]:
        """The plans of the purchase by which these machines may have been launched, at least one.

        Raises:
            ProvisioningError: There is none.
        """
        plans = [plan for plan in self.bought.plans if _is_plan_of(plan, self.cluster.nodes)]
        if not plans:
            raise ProvisioningError(
                "the fleet must be of a known plan, so that a part of it can be bought again"
            )
        return plans

    def without(self, node_ids: Collection[str]) -> Fleet:
        """Return the fleet without some of its machines.

        Raises:
            ProvisioningError: The rest cannot train: a stage would have no machine, or workers would meet at a
                machine on spot, whose loss ends a run.
        """
        kept = tuple(node for node in self.cluster.nodes if node.node_id not in node_ids)
        num_stages = len(self.bought.launch_stages)
        for empty in sorted(set(range(num_stages)) - {node.stage for node in kept}):
            raise ProvisioningError(
                f"each of {num_stages} stages needs a machine, but stage {empty} would have none"
            )
        if all(node.market is Market.SPOT for node in kept):
            raise ProvisioningError("workers must meet at a machine on-demand, but all that stay are on spot")
        plan, *fallback_plans = [plan.only([node.node_id for node in kept]) for plan in self.plans]
        stages = enumerate(self.bought.launch_stages)
        bought = replace(
            self.bought,
            launch_plan=plan,
            fallback_plans=tuple(fallback_plans),
            launch_stages=tuple(stage.on(plan.replicas_of(index)) for index, stage in stages),
        )
        return Fleet(replace(self.cluster, nodes=kept), bought)


def _is_plan_of(plan: ProvisioningPlan, nodes: Sequence[Node]) -> bool:
    """Return whether machines may have been launched by a plan."""
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


@contextmanager
def launched(
    run: FleetRun,
    bought: Provisioning,
    plans: Sequence[ProvisioningPlan] | None = None,
    *,
    kept: Sequence[Node] = (),
    spot_until: datetime | None = None,
) -> Iterator[Cluster]:
    """Launch the first available plan of a purchase, yield its cluster, terminate it whatever happens.

    Args:
        plans: Parts of the purchase; by default all of it.
        kept: Machines of the run that live already, for the cap by the hour.
        spot_until: Until when a plan on spot waits for machines; see `infra.machines.failover`.
    """
    plans = plans or bought.plans
    provider, ledger, caps = run.provider, Ledger(run.workspace.ledger_path), run.caps
    if caps.max_usd_per_hour is not None:
        kept_usd_per_hour = sum(node.price_usd_per_hour + node.disk_usd_per_hour for node in kept)
        caps = replace(caps, max_usd_per_hour=max(caps.max_usd_per_hour - kept_usd_per_hour, 0.0))
    share = ratio(plans[0].price_usd_per_hour, bought.launch_plan.price_usd_per_hour, otherwise=1.0)
    try:
        with first_running_cluster(
            provider,
            plans,
            new_launch_id=lambda: clusters.next_launch_id(ledger, run.run_id),
            bootstrap=clusters.node_bootstrap(run.provider_name, run.directory, model=run.model),
            ledger=ledger,
            caps=caps,
            predicted_cost_usd=bought.predicted_cost_usd * share,
            spent=lambda: clusters.spent_before_launch(provider, ledger, run.run_id),
            spot_until=spot_until,
        ) as cluster:
            yield cluster
    finally:
        clusters.keep_spot_prices(run.workspace, provider, run.run_id)


@contextmanager
def replaced(run: FleetRun, wanted: Fleet, missing: Collection[str]) -> Iterator[Fleet]:
    """Launch the missing machines of a fleet beside its others; yield the fleet of the next generation.

    Raises:
        BudgetExceededError: A cap is exceeded.
        ProvisioningError: No machine is left beside the missing ones, or those are not available.
    """
    kept = [node for node in wanted.cluster.nodes if node.node_id not in missing]
    if not kept:
        raise ProvisioningError("no machine of the fleet is left to be kept")
    plans = [plan.only(missing) for plan in wanted.plans]
    end_nodes(run, wanted.cluster, missing)
    with launched(run, wanted.bought, plans, kept=kept) as new:
        cluster = wanted.cluster.next_generation({node.node_id: node for node in new.nodes})
        yield Fleet(cluster, wanted.bought)


def end_nodes(run: FleetRun, cluster: Cluster, node_ids: Collection[str]) -> None:
    """Terminate lost machines, in case that they live, close their entries and forget their signs of life.

    Raises:
        ProvisioningError: One could not be terminated.
    """
    provider, ledger = run.provider, Ledger(run.workspace.ledger_path)
    ids = {node.provider_instance_id for node in cluster.nodes if node.node_id in node_ids}
    of_run = clusters.ledger_entries(run.workspace, run.run_id)
    entries = [entry for entry in of_run if entry.ended_at is None and entry.provider_instance_id in ids]
    for launch_id in sorted({entry.run_id for entry in entries}):
        there = provider.list_instances(launch_id)
        provider.terminate_instances([each for each in there if each.provider_instance_id in ids])
    for entry in entries:
        ledger.ended(entry.run_id, entry.node_id, reason=EndReason.GONE, at=provider.now())
    _forget_lost(run.directory, node_ids)


def _forget_lost(run_directory: RunDirectory, node_ids: Collection[str]) -> None:
    """Delete the signs of life and notices of lost machines; others may take their places under the same names."""
    for node_id in node_ids:
        for name in (HEARTBEAT, LEAVING):
            run_directory.delete_file(node_key(node_id, name))


def with_causes(run: FleetRun, cluster: Cluster, lost: MachinesLost) -> MachinesLost:
    """Return a loss with the provider's reason for the end of each machine, and write these ends into the ledger."""
    ids = {node.provider_instance_id: node.node_id for node in cluster.nodes if node.node_id in lost.node_ids}
    try:
        known = run.provider.remembered_instances(list(ids)) if ids else ()
    except ProvisioningError as problem:
        logger.warning("why machines of run %s ended is not known: %s", cluster.run_id, problem)
        return lost
    ended = {each.provider_instance_id: each for each in known if each.is_ended and each.ended_because}
    ledger = Ledger(run.workspace.ledger_path)
    for entry in clusters.ledger_entries(run.workspace, run.run_id):
        if entry.ended_at is None and (machine := ended.get(entry.provider_instance_id or "")):
            at = machine.ended_at or run.provider.now()
            ledger.ended(entry.run_id, entry.node_id, reason=machine.end_reason, at=at)
    causes = [
        f"{ids[machine_id]} ({machine_id}) ended: {machine.ended_because}"
        for machine_id, machine in ended.items()
        if machine_id in ids
    ]
    return replace(lost, message="; ".join([lost.message, *causes]))
