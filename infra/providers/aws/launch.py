"""The launch of one run: the settings of its machines, and one attempt to launch all of them in one zone."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from heterps_core.cluster import Node
from heterps_core.errors import ConfigurationError, ProvisioningError
from heterps_core.hardware import ARCHITECTURES, AWS
from heterps_core.plans.provisioning_plan import TableDisk
from infra.bootstrap.node_start import Bootstrap
from infra.ledger.ledger import Ledger
from infra.providers.aws import node_role, passing, queries
from infra.providers.aws.errors import PassingRefusalError, explained, start_failure
from infra.providers.aws.fleet import FleetGroup, request_fleet, zones_for
from infra.providers.aws.launch_template import make_security_group, make_template, template_data
from infra.providers.aws.quotas import quotas_of
from infra.providers.aws.tags import DISK_PRICE_TAG, INTENDED_TAG, LEASE_TAG, group_of, own_tags, owner_tags
from infra.providers.base import InsufficientCapacityError, QuotaExceededError
from infra.providers.launching import node_of
from infra.workspace import run_of_launch

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ec2.type_defs import InstanceTypeDef

_WORKSPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineSettings:
    """The settings of the machines of every run."""

    image_ids: tuple[str, ...] = ()
    """Machine images with Python and torch, one for each architecture; empty for the newest own ones by name."""

    subnet_ids: tuple[str, ...] = ()
    """Subnets of one network, one for each zone that may be taken; empty for the default network, in any zone."""

    node_boundary: str | None = None
    """ARN of the permissions boundary of the nodes' roles; none is made without it."""

    instance_profile: str | None = None
    """Name of a ready-made profile for all nodes, for accounts where roles are made by others."""

    own_tags: Mapping[str, str] = field(default_factory=dict)
    """On everything that a run makes, as a company may demand."""

    workspace: str = "default"
    """Name of their owner, where several share an account: at most 32 letters, digits, '.', '_' and '-'."""

    def __post_init__(self) -> None:
        if not _WORKSPACE.fullmatch(self.workspace):
            raise ConfigurationError(
                f"a workspace's name must be 1 to 32 letters, digits, '.', '_' or '-' and start with a letter or "
                f"digit, got {self.workspace!r}"
            )

    @classmethod
    def of_environment(cls, variables: Mapping[str, str], workspace: str = "default") -> MachineSettings:
        """Return the settings of HETERPS_AWS_*, for the workspace of a name where they give no other."""
        return cls(
            image_ids=tuple(variables.get("HETERPS_AWS_IMAGE", "").split()),
            subnet_ids=tuple(variables.get("HETERPS_AWS_SUBNETS", "").split()),
            node_boundary=variables.get(node_role.BOUNDARY_VARIABLE) or None,
            instance_profile=variables.get(node_role.PROFILE_VARIABLE) or None,
            own_tags=own_tags(variables.get("HETERPS_AWS_TAGS", "")),
            workspace=variables.get("HETERPS_AWS_WORKSPACE") or workspace,
        )

    def tags_for(self, run_id: str) -> dict[str, str]:
        """Return the tags of everything that a run makes."""
        return {**self.own_tags, **owner_tags(run_id, workspace=self.workspace)}

    def name_for(self, run_id: str) -> str:
        """Return the name of a run's security group."""
        return f"heterps-{self.workspace}-{run_id}"

    def template_for(self, run_id: str, architecture: str, table_disk: TableDisk | None) -> str:
        """Return the name of a run's launch template of an architecture and a disk; no run id holds a slash."""
        name = self.name_for(run_id)
        if table_disk is not None:
            name += f"/tables-{table_disk.gigabytes}-{table_disk.mib_per_s}"
        return name if architecture == ARCHITECTURES[0] else f"{name}/{architecture}"


DEFAULT_MACHINES = MachineSettings()


class ZoneFullError(InsufficientCapacityError):
    """The zone of the machines that were had cannot serve the rest of the plan, and there are other zones."""

    def __init__(self, message: str, *, zone: str) -> None:
        super().__init__(message)
        self.zone = zone


@dataclass(kw_only=True)
class RunParts:
    """The parts of a launch that need no plan: the group of its machines, and the role of its nodes.

    AWS knows new ones with a delay of up to a minute, so they are made while the run is planned.
    """

    client: EC2Client
    iam: Any | None
    """boto3's IAM client; None makes no role, and nodes have no rights."""

    machines: MachineSettings
    bootstrap: Bootstrap
    run_id: str
    now: Callable[[], datetime]
    """Returns EC2's time, by which a sweep reads the times of a launch."""

    @cached_property
    def network(self) -> queries.Network:
        """Where the machines may be launched."""
        with explained("find a network"):
            return queries.find_network(self.client, self.machines.subnet_ids)

    @property
    def tags(self) -> dict[str, str]:
        """Tags of what is made now."""
        return {**self.machines.tags_for(self.run_id), INTENDED_TAG: self.now().isoformat()}

    def make_group(self) -> str:
        """Make the security group, or use that of an earlier try; return its id."""
        # A later launch may replace lost machines of an earlier one: all of a run must reach one another.
        name = self.machines.name_for(run_of_launch(self.run_id))
        vpc_id = self.network.vpc_id
        with explained("make the security group"):
            return make_security_group(self.client, name, vpc_id=vpc_id, tags=self.tags)

    def make_role(self, attempt: int) -> str | None:
        """Make the role of an attempt with its profile, or use the ready-made one; return the profile's name."""
        if self.machines.instance_profile is not None:
            return self.machines.instance_profile
        boundary = self.machines.node_boundary
        if self.iam is None or boundary is None or not node_role.is_in_s3(self.bootstrap.run_location):
            return None
        path = node_role.roles_path(self.machines.workspace, self.client.meta.region_name, self.run_id)
        name = node_role.role_name(path, attempt=attempt)
        with explained("make the role of the nodes"):
            policy = node_role.node_policy(self.bootstrap.run_location, self.bootstrap.data_folders)
            node_role.make_node_role(
                self.iam, name, path=path, boundary=boundary, policy=policy, tags=self.tags
            )
        return name


@dataclass(kw_only=True)
class RunLaunch(RunParts):
    """Everything that the attempts to launch one run have in common."""

    lease_until: datetime
    first_boot: str
    ledger: Ledger
    launched_ids: list[str]
    """Grows by every instance that EC2 names, also of requests that failed."""

    _has_old_lease: bool = False

    def attempt(
        self,
        groups: Sequence[FleetGroup],
        *,
        number: int,
        there: Sequence[InstanceTypeDef],
        refused: Collection[str],
    ) -> dict[str, Node]:
        """Have all groups in one zone, and return the nodes by id.

        Live instances of the run (`there`) are adopted; `refused` zones are left out.

        Raises:
            ZoneFullError: Another zone may do.
            ProvisioningError: A group is not available, or the live instances of one are not whole.
        """
        nodes: dict[str, Node] = {}
        zone: str | None = None
        is_prepared = False
        for group in sorted(groups, key=lambda group: -group.price_usd_per_hour):
            for request in group.requests:
                self.ledger.intend(self.run_id, AWS, request, at=self.now(), attempt=number)
            members = [instance for instance in there if group_of(instance) == group.index]
            if not members:
                if not is_prepared:
                    self._prepare(number, {(group.architecture, group.table_disk) for group in groups})
                    is_prepared = True
                members = self._launch(group, number=number, zone=zone, refused=refused)
            self._check_whole(group, members)
            zone = members[0]["Placement"]["AvailabilityZone"]
            # Sorted, the same in every process.
            in_order = sorted(members, key=lambda instance: instance["InstanceId"])
            for request, instance in zip(group.requests, in_order, strict=True):
                offer = group.offer_of(instance["InstanceType"])
                self.ledger.launched(
                    self.run_id,
                    request.node_id,
                    provider_instance_id=instance["InstanceId"],
                    at=instance["LaunchTime"],
                    offer=offer,
                )
                nodes[request.node_id] = node_of(
                    request.with_offer(offer),
                    address=instance["PrivateIpAddress"],
                    provider_instance_id=instance["InstanceId"],
                )
        return nodes

    def _prepare(self, number: int, kinds: Collection[tuple[str, TableDisk | None]]) -> None:
        """Make security group, role and a template of each kind of machine, or use those of an earlier try.

        Args:
            kinds: Architecture, and room for rows of tables.

        Raises:
            ProvisioningError: An architecture has no image; nothing was made.
        """
        architectures = {architecture for architecture, _ in kinds}
        with explained("find the machine images"):
            images = queries.find_images(self.client, self.machines.image_ids, needed=architectures)
        group_id, profile, tags = self.make_group(), self.make_role(number), self.tags
        for architecture, table_disk in kinds:
            data = template_data(
                image=images[architecture],
                security_group_id=group_id,
                first_boot=self.first_boot,
                instance_profile=profile,
                table_disk=table_disk,
                tags={
                    "Name": f"heterps {self.run_id}",
                    INTENDED_TAG: tags[INTENDED_TAG],
                    LEASE_TAG: self.lease_until.isoformat(),
                    **({} if table_disk is None else {DISK_PRICE_TAG: repr(table_disk.usd_per_hour)}),
                },
            )
            name = self.machines.template_for(self.run_id, architecture, table_disk)
            with explained("make the launch template"):
                self._has_old_lease |= not make_template(self.client, name, data, tags=tags)

    def _launch(
        self, group: FleetGroup, *, number: int, zone: str | None, refused: Collection[str]
    ) -> list[InstanceTypeDef]:
        subnet_ids = zones_for(group, self.network, zone=zone, refused=refused)
        try:
            instance_ids, refused_by = self._request(group, number=number, subnet_ids=subnet_ids)
            if refused_by is not None:
                raise refused_by
        except InsufficientCapacityError as problem:
            others = set(self.network.subnet_ids) - {*refused, zone}
            if zone is None or group.offers[0].zone is not None or not others:
                raise
            raise ZoneFullError(str(problem), zone=zone) from problem
        except QuotaExceededError as problem:
            quotas = quotas_of(group.offers)
            raise QuotaExceededError(f"{problem}; quota: {' or '.join(quotas)}", quotas=quotas) from problem
        with explained(f"look at {group}"):
            instances = queries.describe_when_known(self.client, instance_ids)
            if self._has_old_lease:
                queries.renew_lease_tags(self.client, instance_ids, until=self.lease_until)
        if failure := start_failure([each for each in instances if queries.is_ended(each)]):
            raise failure
        return instances

    def _request(
        self, group: FleetGroup, *, number: int, subnet_ids: dict[str, str]
    ) -> tuple[tuple[str, ...], ProvisioningError | None]:
        """Ask for a group, under another token again where the refusal passes by itself."""
        template_name = self.machines.template_for(self.run_id, group.architecture, group.table_disk)
        for repetition, pause_s in enumerate((*passing.PAUSES_S, None)):
            instance_ids: tuple[str, ...] = ()
            problem: ProvisioningError | None
            try:
                with explained(f"launch {group}"):
                    instance_ids, problem = request_fleet(
                        self.client,
                        group,
                        template_name=template_name,
                        subnet_ids=subnet_ids,
                        run_id=self.run_id,
                        attempt=number,
                        repetition=repetition,
                        owner_tags=self.machines.tags_for(self.run_id),
                    )
            except PassingRefusalError as refused:
                problem = refused
            self.launched_ids.extend(instance_ids)
            if pause_s is None or instance_ids or not isinstance(problem, PassingRefusalError):
                break
            time.sleep(pause_s)
        if instance_ids and isinstance(problem, PassingRefusalError):
            problem = InsufficientCapacityError(str(problem))
        return instance_ids, problem

    def _check_whole(self, group: FleetGroup, members: Sequence[InstanceTypeDef]) -> None:
        over = [instance["InstanceId"] for instance in members if queries.is_ended(instance)]
        if over or len(members) != len(group.requests):
            raise ProvisioningError(
                f"a run id stands for one launch, and of {group} of run {self.run_id} "
                f"{len(members) - len(over)} are left, {', '.join(over) or 'others'} were launched and ended "
                f"before; use a new run id"
            )
