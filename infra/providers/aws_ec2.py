"""Machines from Amazon EC2.

Cloud questions are functions that receive the boto3 client; the class keeps the contract of `Provider`.
One launch call per node, with tags, lease and client token in that call: each node has its own user data,
and a call that is repeated with the same token buys nothing twice.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    PartialCredentialsError,
    WaiterError,
)

from heterps_core.cluster import Cluster, Node
from heterps_core.errors import ProvisioningError
from heterps_core.hardware import Market
from heterps_core.plans.provisioning_plan import NodeRequest, ProvisioningPlan
from infra.ledger import EndReason, Ledger
from infra.providers.base import (
    Bootstrap,
    LiveInstance,
    Provider,
    ProviderSettings,
    check_run_id,
    node_environment,
    user_data,
)

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ec2.type_defs import InstanceTypeDef, TagTypeDef

logger = logging.getLogger(__name__)

RUN_TAG = "heterps:run-id"
LEASE_TAG = "heterps:lease-until"
STAGE_TAG = "heterps:stage"
NODE_TAG = "heterps:node-id"

LIVE_STATES = ("pending", "running", "stopping", "stopped")
"""Stopped instances cost their disks and may come back; only a terminated one is gone."""

ENDED_STATES = ("shutting-down", "terminated")
IMAGE_NAME_PATTERN = "heterps-node-*"
RENDEZVOUS_PORT = 29_400
"""torchrun's own default; the security group must allow it between the nodes."""

POLL_INTERVAL_S = 5
GONE_CODES = ("InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed")

WAYS_OUT = {
    "InsufficientInstanceCapacity": "ask for another instance type or zone, or try again later",
    "InsufficientHostCapacity": "ask for another instance type or zone, or try again later",
    "SpotMaxPriceTooLow": "take on-demand, or another instance type",
    "VcpuLimitExceeded": "ask for a higher vCPU quota in Service Quotas, or plan with fewer units",
    "InstanceLimitExceeded": "ask for a higher quota in Service Quotas, or plan with fewer units",
    "MaxSpotInstanceCountExceeded": "ask for a higher spot quota in Service Quotas, or take on-demand",
    "UnauthorizedOperation": "allow this call in the IAM policy of the credentials in use",
    "AuthFailure": "renew the credentials (aws sts get-caller-identity must work) and check the clock",
    "ExpiredToken": "renew the credentials, for instance with aws sso login",
    "RequestExpired": "renew the credentials and check this machine's clock",
    "InvalidClientTokenId": "renew the credentials, for instance with aws sso login",
    "InvalidAMIID.NotFound": "give the id of an image in this region",
    "Unsupported": "take another zone or instance type: this one is not sold there",
    "IdempotentParameterMismatch": "use a new run id: this one stands for another launch",
    "RequestLimitExceeded": "wait a minute and try again: the account makes too many calls",
}
"""What a user can do about an error code of EC2."""


class AwsEc2Provider(Provider):
    """Runs each node on an EC2 instance of one region.

    Args:
        client: boto3's EC2 client; its region is the provider's.
        image_id: Machine image with Python and heterps; None takes the newest own image whose name
            matches IMAGE_NAME_PATTERN.
        subnet_id: None takes the default network.
        instance_profile: Name of the profile that nodes run under; None gives them no rights.
    """

    name: ClassVar[str] = "aws"
    charges_money: ClassVar[bool] = True
    lease_s: ClassVar[float] = 600.0
    # Amazon EC2 pricing: Linux instances are billed by the second, at least 60.
    minimum_billed_s: ClassVar[float] = 60.0

    def __init__(
        self,
        client: EC2Client,
        *,
        image_id: str | None = None,
        subnet_id: str | None = None,
        instance_profile: str | None = None,
    ) -> None:
        self.client = client
        self.image_id = image_id
        self.subnet_id = subnet_id
        self.instance_profile = instance_profile
        # DescribeInstances may not know an instance yet that was launched a second ago.
        self._launched: dict[str, list[str]] = {}

    @classmethod
    def from_settings(cls, settings: ProviderSettings) -> AwsEc2Provider:
        """Make the provider that the settings describe, with boto3's own search for credentials."""
        retries = Config(retries={"mode": "standard", "max_attempts": 5})
        client = boto3.client("ec2", region_name=settings.region, config=retries)
        return cls(
            client,
            image_id=settings.image_id,
            subnet_id=settings.subnet_id,
            instance_profile=settings.instance_profile,
        )

    def launch(
        self,
        plan: ProvisioningPlan,
        *,
        run_id: str,
        lease_until: datetime,
        bootstrap: Bootstrap,
        ledger: Ledger,
    ) -> Cluster:
        """Launch one instance per node; see `Provider.launch`."""
        check_run_id(run_id)
        requests = plan.node_requests()
        self._check_regions(requests)
        with _explained("prepare the launch"):
            image_id = self.image_id or newest_image(self.client, IMAGE_NAME_PATTERN)
            there = {tags_of(i)[NODE_TAG]: i for i in live_instances(self.client, run_id)}
        nodes: list[Node] = []
        for request in requests:
            ledger.intend(run_id, self.name, request, at=datetime.now(UTC))
            try:
                instance = there.get(request.node_id) or self._launch_node(
                    request, run_id=run_id, image_id=image_id, lease_until=lease_until, bootstrap=bootstrap
                )
            except ProvisioningError as problem:
                now = datetime.now(UTC)
                ledger.failed(run_id, request.node_id, reason=str(problem), at=now)
                self.terminate(run_id)
                ledger.close_run(run_id, reason=EndReason.LAUNCH_FAILED, at=now)
                raise
            ledger.launched(
                run_id,
                request.node_id,
                provider_instance_id=instance["InstanceId"],
                at=instance["LaunchTime"],
            )
            nodes.append(_node_of(request, instance))
        return Cluster(
            run_id=run_id,
            provider=self.name,
            nodes=tuple(nodes),
            rendezvous=f"{_rendezvous_host(nodes).address}:{RENDEZVOUS_PORT}",
            created_at=datetime.now(UTC).isoformat(),
        )

    def wait_until_ready(self, cluster: Cluster, *, timeout_s: float) -> None:
        """Return once EC2 reports all instances as running; see `Provider.wait_until_ready`."""
        ids = [node.provider_instance_id for node in cluster.nodes]
        attempts = max(1, round(timeout_s / POLL_INTERVAL_S))
        with _explained("wait for the instances to run"):
            self.client.get_waiter("instance_running").wait(
                InstanceIds=ids, WaiterConfig={"Delay": POLL_INTERVAL_S, "MaxAttempts": attempts}
            )

    def renew_lease(self, run_id: str, *, until: datetime) -> None:
        """Move the lease tags of a run; see `Provider.renew_lease`."""
        with _explained("renew the lease"):
            for instance in live_instances(self.client, run_id):
                renew_lease_tag(self.client, instance["InstanceId"], until=until)

    def terminate(self, run_id: str) -> tuple[str, ...]:
        """Terminate what carries the run's tag; see `Provider.terminate`."""
        check_run_id(run_id)
        with _explained("find the instances to terminate"):
            tagged = [instance["InstanceId"] for instance in live_instances(self.client, run_id)]
        ended: list[str] = []
        problems: list[str] = []
        for instance_id in dict.fromkeys([*tagged, *self._launched.get(run_id, [])]):
            try:
                with _explained(f"terminate {instance_id}"):
                    if terminate_one(self.client, instance_id):
                        ended.append(instance_id)
            except ProvisioningError as problem:
                # The others must end all the same.
                problems.append(str(problem))
        if problems:
            raise ProvisioningError("; ".join(problems))
        self._launched.pop(run_id, None)
        return tuple(ended)

    def terminate_instance(self, instance: LiveInstance) -> None:
        """Terminate one instance; see `Provider.terminate_instance`."""
        with _explained("terminate an instance"):
            terminate_one(self.client, instance.provider_instance_id)

    def list_instances(self, run_id: str | None = None) -> tuple[LiveInstance, ...]:
        """Return instances by tag and state; see `Provider.list_instances`."""
        with _explained("list the instances"):
            return tuple(_live_instance_of(i) for i in live_instances(self.client, run_id))

    def _launch_node(
        self,
        request: NodeRequest,
        *,
        run_id: str,
        image_id: str,
        lease_until: datetime,
        bootstrap: Bootstrap,
    ) -> InstanceTypeDef:
        environment = node_environment(
            request.node_id, provider=self.name, run_id=run_id, bootstrap=bootstrap
        )
        with _explained(f"launch {request.offer.instance_type.name} for {request.node_id}"):
            instance = run_instance(
                self.client,
                request,
                image_id=image_id,
                subnet_id=self.subnet_id,
                instance_profile=self.instance_profile,
                client_token=client_token(run_id, request.node_id),
                tags=launch_tags(request, run_id=run_id, lease_until=lease_until),
                first_boot=user_data(environment, bootstrap.arguments),
            )
        if instance["State"]["Name"] in ENDED_STATES:
            raise ProvisioningError(
                f"a run id stands for one launch, and {request.node_id} of run {run_id} was launched and ended "
                f"before as {instance['InstanceId']}; use a new run id"
            )
        self._launched.setdefault(run_id, []).append(instance["InstanceId"])
        return instance

    def _check_regions(self, requests: Sequence[NodeRequest]) -> None:
        here = self.client.meta.region_name
        elsewhere = sorted({request.offer.region for request in requests} - {here})
        if elsewhere:
            raise ProvisioningError(
                f"all offers of a plan must be of the region that it is launched in, {here}, but some are of "
                f"{', '.join(elsewhere)}; plan with offers of one region and set that region"
            )


def client_token(run_id: str, node_id: str) -> str:
    """Return the token that makes a repeated launch of the same node buy nothing (64 characters at most)."""
    return hashlib.sha256(f"heterps/{run_id}/{node_id}".encode()).hexdigest()


def launch_tags(request: NodeRequest, *, run_id: str, lease_until: datetime) -> dict[str, str]:
    """Return the tags that an instance has from its first moment."""
    return {
        "Name": f"heterps {run_id} {request.node_id}",
        RUN_TAG: run_id,
        NODE_TAG: request.node_id,
        STAGE_TAG: str(request.stage),
        LEASE_TAG: lease_until.isoformat(),
    }


def run_instance(
    client: EC2Client,
    request: NodeRequest,
    *,
    image_id: str,
    subnet_id: str | None,
    instance_profile: str | None,
    client_token: str,
    tags: Mapping[str, str],
    first_boot: str,
) -> InstanceTypeDef:
    """Launch one instance that ends itself when it shuts down, and return it."""
    tag_list: list[TagTypeDef] = [{"Key": key, "Value": value} for key, value in tags.items()]
    options: dict[str, Any] = {}
    if request.offer.market is Market.SPOT:
        # No maximum price: it raises interruptions, and the planner holds the ceiling already.
        spot = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        options["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
    if subnet_id is not None:
        options["SubnetId"] = subnet_id
    if instance_profile is not None:
        options["IamInstanceProfile"] = {"Name": instance_profile}
    if request.offer.zone is not None:
        options["Placement"] = {"AvailabilityZone": request.offer.zone}
    answer = client.run_instances(
        ImageId=image_id,
        InstanceType=request.offer.instance_type.name,  # type: ignore[arg-type]
        MinCount=1,
        MaxCount=1,
        ClientToken=client_token,
        UserData=first_boot,
        InstanceInitiatedShutdownBehavior="terminate",
        MetadataOptions={"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        TagSpecifications=[
            {"ResourceType": "instance", "Tags": tag_list},
            {"ResourceType": "volume", "Tags": tag_list},
        ],
        **options,
    )
    return answer["Instances"][0]


def newest_image(client: EC2Client, name_pattern: str) -> str:
    """Return the id of the account's newest available image whose name matches.

    Raises:
        ProvisioningError: There is none.
    """
    images = client.describe_images(
        Owners=["self"],
        Filters=[{"Name": "name", "Values": [name_pattern]}, {"Name": "state", "Values": ["available"]}],
    )["Images"]
    if not images:
        raise ProvisioningError(
            f"a node needs a machine image with Python and heterps, and the account has none in "
            f"{client.meta.region_name} whose name matches {name_pattern}; make one, or give an image id"
        )
    return max(images, key=lambda image: image["CreationDate"])["ImageId"]


def live_instances(client: EC2Client, run_id: str | None) -> list[InstanceTypeDef]:
    """Return the instances that carry our tags and are not ending, of one run or of all."""
    by_run = (
        {"Name": "tag-key", "Values": [RUN_TAG]}
        if run_id is None
        else {"Name": f"tag:{RUN_TAG}", "Values": [run_id]}
    )
    by_state = {"Name": "instance-state-name", "Values": list(LIVE_STATES)}
    pages = client.get_paginator("describe_instances").paginate(Filters=[by_run, by_state])  # type: ignore[list-item]
    return [i for page in pages for reservation in page["Reservations"] for i in reservation["Instances"]]


def terminate_one(client: EC2Client, instance_id: str) -> bool:
    """Terminate one instance and tell whether it was there.

    One by one, because EC2 refuses the whole batch for one unknown id.
    """
    try:
        client.terminate_instances(InstanceIds=[instance_id])
    except ClientError as problem:
        if problem.response["Error"]["Code"] in GONE_CODES:
            return False
        raise
    return True


def renew_lease_tag(client: EC2Client, instance_id: str, *, until: datetime) -> None:
    """Write the lease tag of one instance; one that is gone is no error."""
    try:
        client.create_tags(Resources=[instance_id], Tags=[{"Key": LEASE_TAG, "Value": until.isoformat()}])
    except ClientError as problem:
        if problem.response["Error"]["Code"] not in GONE_CODES:
            raise


def tags_of(instance: InstanceTypeDef) -> dict[str, str]:
    """Return the tags of an instance as a dictionary, our own keys always among them."""
    tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", [])}
    return {RUN_TAG: "", NODE_TAG: "", LEASE_TAG: "", **tags}


def _live_instance_of(instance: InstanceTypeDef) -> LiveInstance:
    tags = tags_of(instance)
    return LiveInstance(
        provider_instance_id=instance["InstanceId"],
        run_id=tags[RUN_TAG],
        node_id=tags[NODE_TAG],
        instance_type=instance["InstanceType"],
        launched_at=instance["LaunchTime"],
        lease_until=_lease_end(tags[LEASE_TAG]),
        is_owner_dead=False,
    )


def _lease_end(text: str) -> datetime | None:
    try:
        until = datetime.fromisoformat(text)
    except ValueError:
        return None
    return until if until.tzinfo else None


def _rendezvous_host(nodes: Sequence[Node]) -> Node:
    """Return the first node that is not on spot: losing the rendezvous host ends the run."""
    return next((node for node in nodes if node.market is Market.ON_DEMAND), nodes[0])


def _node_of(request: NodeRequest, instance: InstanceTypeDef) -> Node:
    return Node(
        node_id=request.node_id,
        address=instance["PrivateIpAddress"],
        device_type=request.device_type,
        instance_type=request.offer.instance_type.name,
        market=request.offer.market,
        stage=request.stage,
        num_workers=request.num_workers,
        price_usd_per_hour=request.offer.price_usd_per_hour,
        provider_instance_id=instance["InstanceId"],
    )


@contextmanager
def _explained(action: str) -> Iterator[None]:
    """Turn boto3's errors into ours, with what a user can do."""
    try:
        yield
    except ClientError as problem:
        code = problem.response["Error"]["Code"]
        way_out = WAYS_OUT.get(code, "look the code up in the EC2 API reference, Error codes")
        message = problem.response["Error"].get("Message", "")
        raise ProvisioningError(f"AWS refused to {action}: {code}: {message}; {way_out}") from problem
    except (NoCredentialsError, PartialCredentialsError) as problem:
        raise ProvisioningError(
            f"to {action}, AWS credentials are needed and none were found: run aws configure or aws sso login, "
            f"set AWS_PROFILE, or use the provider local"
        ) from problem
    except (WaiterError, BotoCoreError) as problem:
        raise ProvisioningError(
            f"AWS could not {action}: {problem}; check the network and region"
        ) from problem
