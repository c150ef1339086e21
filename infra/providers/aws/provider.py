"""Amazon EC2 as a provider: launches plans whole or not at all, finds and ends their machines.

The most expensive part of a plan goes first, as the scarcest; others follow into its zone. Where that cannot serve
the rest, what was had is ended, stays in the bill as waste, and another zone is tried as the run's next attempt.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from botocore.exceptions import WaiterError

from heterps_core.cluster import Cluster
from heterps_core.errors import ConfigurationError, ProvisioningError
from heterps_core.hardware import ARCHITECTURES, AWS, InstanceOffer, Market
from heterps_core.instance_metadata import is_in_the_cloud
from heterps_core.plans.provisioning_plan import NodeRequest, ProvisioningPlan
from infra.bootstrap.node_start import Bootstrap, node_environment, user_data
from infra.checks import Check
from infra.ledger.ledger import EndReason, LedgerEntry
from infra.ledger.ledger_entry import Instance
from infra.prices.live_prices import LivePrices
from infra.prices.spot_charges import SpotHistory
from infra.providers.aws import node_role, queries
from infra.providers.aws.access_checks import access_checks
from infra.providers.aws.errors import aws_client, explained, start_failure
from infra.providers.aws.fleet import fleet_groups
from infra.providers.aws.launch import DEFAULT_MACHINES, MachineSettings, RunLaunch, RunParts, ZoneFullError
from infra.providers.aws.launch_template import (
    DISK_GB,
    delete_security_group,
    delete_template,
    own_security_groups,
    own_templates,
    remove_leftovers,
)
from infra.providers.aws.passing import repeat_passing
from infra.providers.aws.prices import AwsPrices, prices_of_machines
from infra.providers.aws.quotas import Quotas, asks_less
from infra.providers.aws.tags import attempt_of, instance_of
from infra.providers.base import Launch, Provider, UnitLimits
from infra.workspace import Workspace, check_run_id, has_run_store

if TYPE_CHECKING:
    from botocore.config import Config
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ec2.type_defs import InstanceTypeDef

logger = logging.getLogger(__name__)

RENDEZVOUS_PORT = 29_400
"""The default of torch; the security group lets the nodes reach one another on every port."""

POLL_INTERVAL_S = 5

LONGEST_PLAN = timedelta(hours=1)
"""What is younger may be of a run that is planned, or of a launch before its machines start."""


_BRIEF = (1, 3, 10)
"""Configuration for questions that no run depends on, to services that may be out of reach."""


def _config(attempts: int = 5, connect_s: int = 10, read_s: int = 30) -> Config:
    from botocore.config import Config

    return Config(
        connect_timeout=connect_s, read_timeout=read_s, retries={"mode": "adaptive", "max_attempts": attempts}
    )


class AwsEc2Provider(Provider):
    """Runs each node on an EC2 instance of one region.

    Its region is that of boto3's EC2 client; without an IAM client it makes no roles, and nodes have no rights;
    without quotas all plans keep within them.
    """

    name: ClassVar[str] = AWS
    charges_services: ClassVar[bool] = True
    node_python: ClassVar[str] = "/opt/heterps/bin/python"
    has_regions: ClassVar[bool] = True
    lease_s: ClassVar[float] = 600.0
    # Amazon EC2 pricing: Linux instances are billed by the second, at least 60.
    minimum_billed_s: ClassVar[float] = 60.0
    # EC2 shows new tags with a delay that it gives no bound for; minutes were never seen.
    tags_grace_s: ClassVar[float] = 300.0
    disk_gb_each: ClassVar[float] = DISK_GB
    live_prices: ClassVar[type[LivePrices] | None] = AwsPrices
    # Without a run store nothing was rented, and an instance reads a bucket of its region for nothing.
    is_set_up = staticmethod(has_run_store)
    is_beside_store = staticmethod(is_in_the_cloud)
    asks_less = staticmethod(asks_less)

    def __init__(
        self,
        client: EC2Client,
        machines: MachineSettings = DEFAULT_MACHINES,
        *,
        iam: Any | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self.client = client
        self.iam = iam
        self.machines = machines
        self._quotas = quotas
        # DescribeInstances may not know an instance yet that was launched a second ago.
        self._launched: dict[str, list[str]] = {}
        repeat_passing(*filter(None, (client, iam)))
        # Hears the time with each answer from here on.
        self._clock = queries.Ec2Clock(client)

    @classmethod
    def for_workspace(cls, workspace: Workspace, *, region: str) -> Self:
        """Make the provider by HETERPS_AWS_*, with boto3's own search for credentials; see `Provider`."""
        client_of = partial(aws_client, region=region, config=_config())
        # A name is drawn only where it counts: on a full disk a sweep could not write it, and machines must end.
        name = os.environ.get("HETERPS_AWS_WORKSPACE") or workspace.cloud_name()
        machines = MachineSettings.of_environment(os.environ, name)
        ec2 = client_of("ec2")
        quotas = Quotas(partial(client_of, "service-quotas", config=_config(*_BRIEF)), ec2)
        return cls(ec2, machines, iam=client_of("iam"), quotas=quotas)

    def now(self) -> datetime:
        """Return EC2's time; see `Provider.now`."""
        if not self._clock.is_set:
            with explained("look for instances"):
                queries.live_instances(self.client, self.machines.workspace, "none")
        return self._clock.now()

    def looks_after(self, entry: LedgerEntry) -> bool:
        """Tell whether a machine is in this region; see `Provider.looks_after`."""
        return super().looks_after(entry) and entry.region == self.client.meta.region_name

    def all_regions(self) -> tuple[str, ...]:
        """Return the regions that the account may use; see `Provider.all_regions`."""
        with explained("name the regions of the account"):
            return tuple(region["RegionName"] for region in self.client.describe_regions()["Regions"])

    def checks(self) -> Iterator[Check]:
        """Check that a launch would succeed; see `Provider.checks`."""
        known = {"ec2": self.client, "iam": self.iam}
        other = cache(partial(aws_client, region=self.client.meta.region_name, config=_config(*_BRIEF)))
        return access_checks(self.machines, client_of=lambda service: known.get(service) or other(service))

    def missing_images(self) -> dict[str, str]:
        """Look for the images of the account, or those that are named; see `Provider.missing_images`."""
        region, image_ids = self.client.meta.region_name, self.machines.image_ids
        with explained("find the machine images"):
            found = queries.find_images(self.client, image_ids)
        return {
            architecture: queries.missing_image(architecture, region=region, image_ids=image_ids)
            for architecture in ARCHITECTURES
            if architecture not in found
        }

    def zones(self) -> Collection[str]:
        """Return those of the network's subnets; see `Provider.zones`."""
        with explained("find a network"):
            return queries.find_network(self.client, self.machines.subnet_ids).subnet_ids

    def unit_limits(self, device_types: Iterable[str], offers: Iterable[InstanceOffer]) -> UnitLimits:
        """Return the units that the account's quotas allow; see `Provider.unit_limits`."""
        return self._quotas.unit_limits(device_types, offers) if self._quotas else UnitLimits({}, {}, "")

    def check_quotas(self, plan: ProvisioningPlan) -> None:
        """Check a plan against the account's quotas; see `Provider.check_quotas`."""
        if self._quotas is not None:
            self._quotas.check(plan)

    def check_run_directory(self, location: str) -> None:
        """Check that nodes can be given a role for it; see `Provider.check_run_directory`."""
        if self.iam is not None and node_role.is_in_s3(location):
            if self.machines.instance_profile is None:
                node_role.check_boundary(self.machines.node_boundary)
            node_role.node_policy(location)

    @contextmanager
    def prepared(self, run_id: str, bootstrap: Bootstrap) -> Iterator[None]:
        """Make security group, role and profile of a run's first launch; see `Provider.prepared`."""
        self.check_run_directory(bootstrap.run_location)
        parts = RunParts(
            client=self.client,
            iam=self.iam,
            machines=self.machines,
            bootstrap=bootstrap,
            run_id=run_id,
            now=self._clock.now,
        )
        with ExitStack() as undo:
            undo.callback(self._remove_parts, run_id)
            parts.make_group()
            parts.make_role(1)
            yield
            undo.pop_all()

    def _remove_parts(self, run_id: str) -> None:
        try:
            self.terminate(run_id)
            with explained("delete the security group"):
                for group_id, _ in own_security_groups(self.client, self.machines.workspace, run_id):
                    delete_security_group(self.client, group_id)
        except ProvisioningError as problem:
            logger.warning("run %s: its group and role stay to the next sweep: %s", run_id, problem)

    def launched(self, plan: ProvisioningPlan, launch: Launch) -> Cluster:
        """Launch one fleet request per group of equal nodes; see `Provider.launch`."""
        run_id, bootstrap, ledger = launch.run_id, launch.bootstrap, launch.ledger
        requests = plan.node_requests()
        self._check_regions(requests)
        self.check_run_directory(bootstrap.run_location)
        with explained("prepare the launch"):
            there = queries.live_instances(self.client, self.machines.workspace, run_id)
        if not there:
            self.check_quotas(plan)
        attempts = RunLaunch(
            client=self.client,
            iam=self.iam,
            machines=self.machines,
            bootstrap=bootstrap,
            run_id=run_id,
            lease_until=launch.lease_until,
            first_boot=user_data(
                node_environment(
                    bootstrap, run_id=run_id, lease_s=self.lease_s, is_process=False, is_dry_run=False
                ),
                bootstrap.arguments,
            ),
            ledger=ledger,
            launched_ids=self._launched.setdefault(run_id, []),
            now=self._clock.now,
        )
        attempt = max(ledger.last_attempt(run_id), *map(attempt_of, there), 1)
        refused: set[str] = set()
        while True:
            try:
                nodes = attempts.attempt(fleet_groups(requests), number=attempt, there=there, refused=refused)
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
        ordered = tuple(nodes[request.node_id] for request in requests)
        # Losing the rendezvous host ends the run.
        host = next((node for node in ordered if node.market is Market.ON_DEMAND), ordered[0])
        return Cluster(
            run_id=run_id,
            provider=self.name,
            nodes=ordered,
            rendezvous=f"{host.address}:{RENDEZVOUS_PORT}",
            created_at=datetime.now(UTC).isoformat(),
        )

    def wait_until_ready(self, cluster: Cluster, *, timeout_s: float) -> None:
        """Return once EC2 reports all instances as running; see `Provider.wait_until_ready`."""
        ids = [node.provider_instance_id for node in cluster.nodes]
        attempts = max(1, round(timeout_s / POLL_INTERVAL_S))
        waiter = self.client.get_waiter("instance_running")
        with explained("wait for the instances to run"):
            try:
                waiter.wait(InstanceIds=ids, WaiterConfig={"Delay": POLL_INTERVAL_S, "MaxAttempts": attempts})
            except WaiterError as problem:
                described: Any = problem.last_response
                reservations = described.get("Reservations", ())
                if failure := start_failure(i for each in reservations for i in each["Instances"]):
                    raise failure from problem
                raise

    def renew_lease(self, run_id: str, *, until: datetime) -> None:
        """Move the lease tags of a run; see `Provider.renew_lease`."""
        with explained("renew the lease"):
            instances = queries.live_instances(self.client, self.machines.workspace, run_id)
            queries.renew_lease_tags(
                self.client, [instance["InstanceId"] for instance in instances], until=until
            )

    def terminate(self, run_id: str) -> tuple[str, ...]:
        """Terminate instances with the run's tag, delete its template and its role; see `Provider.terminate`."""
        check_run_id(run_id)
        with explained("find the instances to terminate"):
            tagged = queries.live_instances(self.client, self.machines.workspace, run_id)
        known = [*(instance["InstanceId"] for instance in tagged), *self._launched.get(run_id, [])]
        ended, problems = queries.terminate_all(self.client, list(dict.fromkeys(known)))
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
                    node_role.delete_node_role(self.iam, role)
        except ProvisioningError as problem:
            # Machines have ended: what costs nothing must not keep their end out of the ledger.
            logger.warning("run %s: the role of its nodes stays to the next sweep: %s", run_id, problem)
        return tuple(ended)

    def terminate_instances(self, instances: Sequence[Instance]) -> None:
        """Terminate instances; see `Provider.terminate_instances`."""
        _, problems = queries.terminate_all(self.client, [each.provider_instance_id for each in instances])
        if problems:
            raise ProvisioningError("; ".join(problems))

    def list_instances(self, run_id: str | None = None) -> tuple[Instance, ...]:
        """Return instances by tag and state; see `Provider.list_instances`."""
        with explained("list the instances"):
            return self._read(queries.live_instances(self.client, self.machines.workspace, run_id))

    def remembered_instances(self, provider_instance_ids: Collection[str]) -> tuple[Instance, ...]:
        """Return instances by tag or id in every state; see `Provider.remembered_instances`."""
        with explained("look for instances"):
            return self._read(
                queries.remembered_instances(self.client, self.machines.workspace, provider_instance_ids)
            )

    def spot_prices(self, entries: Collection[LedgerEntry]) -> dict[str, SpotHistory]:
        """Ask for the price history of each machine's type and zone; see `Provider.spot_prices`."""
        with explained("give the prices of spot machines"):
            return prices_of_machines(self.client, self.machines.workspace, entries)

    def remove_leftovers(self, *, now: datetime) -> tuple[str, ...]:
        """Delete templates, security groups and roles of runs without machines; see `Provider.remove_leftovers`."""
        with explained("delete what runs left"):
            return remove_leftovers(
                self.client,
                self.iam,
                self.machines.workspace,
                self._node_roles(),
                live_run_ids={instance.run_id for instance in self.list_instances()},
                made_before=now - LONGEST_PLAN,
            )

    def _node_roles(self, run_id: str | None = None) -> list[node_role.NodeRole]:
        path = node_role.roles_path(self.machines.workspace, self.client.meta.region_name, run_id)
        return [] if self.iam is None else node_role.own_node_roles(self.iam, path)

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
