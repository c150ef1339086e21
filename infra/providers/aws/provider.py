"""Amazon EC2 as a provider: launches plans whole or not at all, finds and ends their machines.

The parts of a plan are unlike, so each is a fleet request of its own, and this code sees to it that a run has all
or none. The dearest goes first, because it is the scarcest and a refusal then wastes least; the others follow into
its zone. Where that zone cannot serve the rest, what was had is ended, stays in the bill as waste, and another zone
is tried as the run's next attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import boto3
from botocore.config import Config

from heterps_core.cluster import Cluster, Node
from heterps_core.errors import ConfigurationError, ProvisioningError
from heterps_core.hardware import AWS, Market
from heterps_core.plans.provisioning_plan import NodeRequest, ProvisioningPlan
from infra.instances import Instance
from infra.ledger.ledger import EndReason, Ledger, LedgerEntry
from infra.prices.spot_charges import SpotRecord
from infra.providers.aws.clock import Ec2Clock
from infra.providers.aws.errors import explained
from infra.providers.aws.fleet import fleet_groups
from infra.providers.aws.instances import renew_lease_tags, terminate_all
from infra.providers.aws.launch import DEFAULT_MACHINES, MachineSettings, RunLaunch, ZoneFullError
from infra.providers.aws.launch_template import DISK_GB, delete_template, own_templates
from infra.providers.aws.node_role import (
    NodeRole,
    check_boundary,
    delete_node_role,
    is_in_s3,
    node_policy,
    own_node_roles,
    roles_path,
)
from infra.providers.aws.queries import live_instances, remembered_instances
from infra.providers.aws.security_group import delete_security_group, own_security_groups
from infra.providers.aws.spot_history import spot_histories, spot_record_of
from infra.providers.aws.tags import INTENDED_TAG, RUN_TAG, attempt_of, instance_of, moment_or_none
from infra.providers.base import (
    Bootstrap,
    Provider,
    ProviderSettings,
    check_run_id,
    node_environment,
    user_data,
)

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ec2.type_defs import InstanceTypeDef

logger = logging.getLogger(__name__)

RENDEZVOUS_PORT = 29_400
"""torchrun's own default; the security group lets the nodes reach one another on every port."""

POLL_INTERVAL_S = 5


class AwsEc2Provider(Provider):
    """Runs each node on an EC2 instance of one region.

    Args:
        client: boto3's EC2 client; its region is the provider's.
        machines: What its machines are made from.
        iam: boto3's IAM client; None makes no roles, and nodes have no rights.
    """

    name: ClassVar[str] = AWS
    charges_money: ClassVar[bool] = True
    has_regions: ClassVar[bool] = True
    lease_s: ClassVar[float] = 600.0
    # Amazon EC2 pricing: Linux instances are billed by the second, at least 60.
    minimum_billed_s: ClassVar[float] = 60.0
    # EC2 shows what it was told with a delay that it gives no bound for; minutes were never seen.
    tags_grace_s: ClassVar[float] = 300.0
    disk_gb_each: ClassVar[float] = DISK_GB

    def __init__(
        self, client: EC2Client, machines: MachineSettings = DEFAULT_MACHINES, *, iam: Any | None = None
    ) -> None:
        self.client = client
        self.iam = iam
        self.machines = machines
        # DescribeInstances may not know an instance yet that was launched a second ago.
        self._launched: dict[str, list[str]] = {}

    @cached_property
    def _clock(self) -> Ec2Clock:
        return Ec2Clock(self.client)

    @classmethod
    def from_settings(cls, settings: ProviderSettings) -> AwsEc2Provider:
        """Make the provider that the settings describe, with boto3's own search for credentials.

        Raises:
            ProvisioningError: The region's name cannot be one.
        """
        retries = Config(retries={"mode": "standard", "max_attempts": 5})
        with explained("set up its client"):
            client = boto3.client("ec2", region_name=settings.region, config=retries)
            iam = boto3.client("iam", region_name=settings.region, config=retries)
        machines = MachineSettings(
            image_id=settings.image_id,
            subnet_id=settings.subnet_id,
            node_boundary=settings.node_boundary,
            key_name=settings.key_name,
            workspace=settings.workspace,
        )
        return cls(client, machines, iam=iam)

    def now(self) -> datetime:
        """Return EC2's time; see `Provider.now`."""
        if not self._clock.is_set:
            with explained("look for instances"):
                live_instances(self.client, self.machines.workspace, "none")
        return self._clock.now()

    def looks_after(self, entry: LedgerEntry) -> bool:
        """Tell whether a machine is in this region; see `Provider.looks_after`."""
        return super().looks_after(entry) and entry.region == self.client.meta.region_name

    def check_run_directory(self, location: str) -> None:
        """Check that nodes can be given a role for it; see `Provider.check_run_directory`."""
        if self.iam is not None and is_in_s3(location):
            check_boundary(self.machines.node_boundary)
            node_policy(location)

    def launch(
        self,
        plan: ProvisioningPlan,
        *,
        run_id: str,
        lease_until: datetime,
        bootstrap: Bootstrap,
        ledger: Ledger,
    ) -> Cluster:
        """Launch one fleet request per group of equal nodes; see `Provider.launch`."""
        check_run_id(run_id)
        requests = plan.node_requests()
        self._check_regions(requests)
        self.check_run_directory(bootstrap.run_directory)
        # From here on it hears the time with each answer, and needs none of its own.
        clock = self._clock
        with explained("prepare the launch"):
            there = live_instances(self.client, self.machines.workspace, run_id)
        launch = RunLaunch(
            self.client,
            self.iam,
            self.machines,
            run_directory=bootstrap.run_directory,
            run_id=run_id,
            lease_until=lease_until,
            first_boot=user_data(
                node_environment(
                    provider=self.name, run_id=run_id, lease_s=self.lease_s, bootstrap=bootstrap
                ),
                bootstrap.arguments,
            ),
            ledger=ledger,
            launched_ids=self._launched.setdefault(run_id, []),
            now=clock.now,
        )
        attempt = max(ledger.last_attempt(run_id), *map(attempt_of, there), 1)
        refused: set[str] = set()
        while True:
            try:
                nodes = launch.attempt(fleet_groups(requests), number=attempt, there=there, refused=refused)
                break
            except ConfigurationError:
                # Another plan than the one that may be running: that one is left alone.
                raise
            except ZoneFullError as problem:
                self.end_run(run_id, ledger=ledger, reason=EndReason.LAUNCH_FAILED, problem=str(problem))
                logger.warning("run %s: %s; trying another zone", run_id, problem)
                refused.add(problem.zone)
                there, attempt = [], attempt + 1
            except BaseException as problem:
                self.end_run(run_id, ledger=ledger, reason=EndReason.LAUNCH_FAILED, problem=str(problem))
                raise
        return Cluster(
            run_id=run_id,
            provider=self.name,
            nodes=tuple(nodes[request.node_id] for request in requests),
            rendezvous=f"{_rendezvous_host([nodes[r.node_id] for r in requests]).address}:{RENDEZVOUS_PORT}",
            created_at=datetime.now(UTC).isoformat(),
        )

    def wait_until_ready(self, cluster: Cluster, *, timeout_s: float) -> None:
        """Return once EC2 reports all instances as running; see `Provider.wait_until_ready`."""
        ids = [node.provider_instance_id for node in cluster.nodes]
        attempts = max(1, round(timeout_s / POLL_INTERVAL_S))
        with explained("wait for the instances to run"):
            self.client.get_waiter("instance_running").wait(
                InstanceIds=ids, WaiterConfig={"Delay": POLL_INTERVAL_S, "MaxAttempts": attempts}
            )

    def renew_lease(self, run_id: str, *, until: datetime) -> None:
        """Move the lease tags of a run; see `Provider.renew_lease`."""
        with explained("renew the lease"):
            instances = live_instances(self.client, self.machines.workspace, run_id)
            renew_lease_tags(self.client, [instance["InstanceId"] for instance in instances], until=until)

    def terminate(self, run_id: str) -> tuple[str, ...]:
        """Terminate what carries the run's tag, delete its template and its role; see `Provider.terminate`."""
        check_run_id(run_id)
        with explained("find the instances to terminate"):
            tagged = live_instances(self.client, self.machines.workspace, run_id)
        known = [*(instance["InstanceId"] for instance in tagged), *self._launched.get(run_id, [])]
        ended, problems = terminate_all(self.client, list(dict.fromkeys(known)))
        if problems:
            raise ProvisioningError("; ".join(problems))
        # Emptied, not dropped: a launch that goes on elsewhere adds to this very list.
        self._launched.get(run_id, []).clear()
        with explained("delete the launch template"):
            for name, _ in own_templates(self.client, self.machines.workspace, run_id):
                delete_template(self.client, name)
        # After the template, which names the profile.
        try:
            with explained("delete the role of the nodes"):
                for role in self._node_roles(run_id):
                    delete_node_role(self.iam, role)
        except ProvisioningError as problem:
            # Machines have ended: what costs nothing must not keep their end out of the ledger.
            logger.warning("run %s: the role of its nodes stays to the next sweep: %s", run_id, problem)
        return tuple(ended)

    def terminate_instance(self, instance: Instance) -> None:
        """Terminate one instance; see `Provider.terminate_instance`."""
        _, problems = terminate_all(self.client, [instance.provider_instance_id])
        if problems:
            raise ProvisioningError("; ".join(problems))

    def list_instances(self, run_id: str | None = None) -> tuple[Instance, ...]:
        """Return instances by tag and state; see `Provider.list_instances`."""
        with explained("list the instances"):
            return self._read(live_instances(self.client, self.machines.workspace, run_id))

    def remembered_instances(self, provider_instance_ids: Collection[str]) -> tuple[Instance, ...]:
        """Return instances by tag or id in every state; see `Provider.remembered_instances`."""
        with explained("look for instances"):
            return self._read(
                remembered_instances(self.client, self.machines.workspace, provider_instance_ids)
            )

    def spot_records(self, entries: Collection[LedgerEntry]) -> dict[str, SpotRecord]:
        """Ask for the price history of each machine's type and zone; see `Provider.spot_records`."""
        launched_at = {
            entry.provider_instance_id: entry.launched_at
            for entry in entries
            if entry.market is Market.SPOT and entry.provider_instance_id and entry.launched_at
        }
        if not launched_at:
            return {}
        with explained("give the prices of spot machines"):
            found = [
                instance
                for instance in remembered_instances(self.client, self.machines.workspace, list(launched_at))
                if instance["InstanceId"] in launched_at
            ]
            histories = spot_histories(
                self.client,
                sorted({instance["InstanceType"] for instance in found}),
                since=min(launched_at.values()),
            )
        return {
            instance["InstanceId"]: spot_record_of(instance, histories[pool])
            for instance in found
            if (pool := (instance["InstanceType"], instance["Placement"]["AvailabilityZone"])) in histories
        }

    def remove_leftovers(self, *, now: datetime) -> tuple[str, ...]:
        """Delete templates, security groups and roles of runs without machines; see `Provider.remove_leftovers`."""
        workspace = self.machines.workspace
        with explained("delete what runs left"):
            live = {instance.run_id for instance in self.list_instances()}
            templates = [
                name
                for name, tags in own_templates(self.client, workspace)
                if self._is_leftover(tags, live, now) and delete_template(self.client, name)
            ]
            groups = [
                group_id
                for group_id, tags in own_security_groups(self.client, workspace)
                if self._is_leftover(tags, live, now) and delete_security_group(self.client, group_id)
            ]
            roles = [
                role
                for role in self._node_roles()
                if role.run_id not in live and not self._is_young(role.made_at, now)
            ]
            for role in roles:
                delete_node_role(self.iam, role)
        return (*templates, *groups, *(role.name for role in roles))

    def _node_roles(self, run_id: str | None = None) -> list[NodeRole]:
        path = roles_path(self.machines.workspace, self.client.meta.region_name, run_id)
        return [] if self.iam is None else own_node_roles(self.iam, path)

    def _is_leftover(self, tags: Mapping[str, str], live_run_ids: Collection[str], now: datetime) -> bool:
        made_at = moment_or_none(tags[INTENDED_TAG])
        is_young = made_at is not None and self._is_young(made_at, now)
        return tags[RUN_TAG] not in live_run_ids and not is_young

    def _is_young(self, made_at: datetime, now: datetime) -> bool:
        """Tell whether a thing may be of a launch whose machines are still to come."""
        return (now - made_at).total_seconds() <= self.lease_s

    def _read(self, described: Sequence[InstanceTypeDef]) -> tuple[Instance, ...]:
        return tuple(instance_of(instance, region=self.client.meta.region_name) for instance in described)

    def _check_regions(self, requests: Sequence[NodeRequest]) -> None:
        here = self.client.meta.region_name
        elsewhere = sorted({request.offer.region for request in requests} - {here})
        if elsewhere:
            raise ProvisioningError(
                f"all offers of a plan must be of the region that it is launched in, {here}, but some are of "
                f"{', '.join(elsewhere)}; plan with offers of one region and set that region"
            )


def _rendezvous_host(nodes: Sequence[Node]) -> Node:
    """Return the first node that is not on spot: losing the rendezvous host ends the run."""
    return next((node for node in nodes if node.market is Market.ON_DEMAND), nodes[0])
