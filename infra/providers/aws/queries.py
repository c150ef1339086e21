"""The machine images, subnets and instances of an account; renews leases of instances and terminates them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from heterps_core.errors import ProvisioningError
from heterps_core.hardware import ARCHITECTURES, Market
from infra.providers.aws import passing
from infra.providers.aws.errors import GONE_CODES, explained, is_refused
from infra.providers.aws.tags import ENDED_STATES, LEASE_TAG, own_filters

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ec2.type_defs import FilterTypeDef, ImageTypeDef, InstanceTypeDef, TagTypeDef

LIVE_STATES = ("pending", "running", "stopping", "stopped")
"""Stopped instances cost their disks and may come back; only a terminated one is gone."""

IMAGE_NAME_PATTERN = "heterps-node-*"

_MAX_FILTER_VALUES = 200

TOLERANCE = timedelta(seconds=5)
"""Answers carry whole seconds and take some time: a smaller difference is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Where instances may be launched."""

    vpc_id: str
    subnet_ids: dict[str, str]
    """By zone; a fleet request takes one subnet of a zone."""


def find_images(
    client: EC2Client, image_ids: Sequence[str], *, needed: Collection[str] = ()
) -> dict[str, ImageTypeDef]:
    """Return the image of each architecture: those with given ids, or the account's newest own images for nodes.

    Ids of images of other regions are passed over.

    Raises:
        ProvisioningError: A needed architecture has no image in the region.
    """
    if image_ids:
        # A filter, unlike the parameter for ids, is no error where one is not known.
        images = client.describe_images(Filters=[{"Name": "image-id", "Values": list(image_ids)}])["Images"]
    else:
        images = client.describe_images(
            Owners=["self"],
            Filters=[
                {"Name": "name", "Values": [IMAGE_NAME_PATTERN]},
                {"Name": "state", "Values": ["available"]},
            ],
        )["Images"]
    by_age = sorted(images, key=lambda image: (image["CreationDate"], image["Name"]))
    found = {image.get("Architecture", ARCHITECTURES[0]): image for image in by_age}
    for architecture in sorted(set(needed) - found.keys()):
        region = client.meta.region_name
        raise ProvisioningError(missing_image(architecture, region=region, image_ids=image_ids))
    return found


def missing_image(architecture: str, *, region: str, image_ids: Sequence[str]) -> str:
    """Return the error about an architecture without an image, with the command that makes one or names it."""
    if image_ids:
        there = (
            f"none that HETERPS_AWS_IMAGE names ({' '.join(image_ids)}) is one in {region}; add the id of an "
            f"{architecture} image there"
        )
    else:
        there = (
            f"the account has none in {region} whose name matches {IMAGE_NAME_PATTERN}; set up an {architecture} "
            f"instance by docs/AWS.md and run aws ec2 create-image --region {region} --instance-id ID --name "
            f"{IMAGE_NAME_PATTERN.rstrip('*')}{architecture}, copy one of another region with aws ec2 copy-image "
            f"--region {region} --source-region REGION --source-image-id ID --name "
            f"{IMAGE_NAME_PATTERN.rstrip('*')}{architecture}, or set HETERPS_AWS_IMAGE to the id of an image"
        )
    return f"{architecture} nodes need an {architecture} machine image with Python and torch, and {there}"


def find_network(client: EC2Client, subnet_ids: Sequence[str]) -> Network:
    """Return the network of some subnets, or the default network with its subnet of each zone.

    Raises:
        ProvisioningError: There is no default network, or the subnets are of several.
    """
    chosen: FilterTypeDef = {"Name": "default-for-az", "Values": ["true"]}
    asked = {"SubnetIds": list(subnet_ids)} if subnet_ids else {"Filters": [chosen]}
    subnets = client.describe_subnets(**asked)["Subnets"]
    if not subnets:
        raise ProvisioningError(
            f"instances need a network, and the account has no default network in {client.meta.region_name}; set "
            f"HETERPS_AWS_SUBNETS to subnets of one network, or make a default one with aws ec2 create-default-vpc"
        )
    if len(networks := {subnet["VpcId"] for subnet in subnets}) > 1:
        raise ProvisioningError(
            f"the subnets of HETERPS_AWS_SUBNETS must be of one network, got "
            f"{', '.join(sorted(networks))}; name those of one"
        )
    return Network(
        vpc_id=subnets[0]["VpcId"],
        subnet_ids={subnet["AvailabilityZone"]: subnet["SubnetId"] for subnet in subnets},
    )


def live_instances(client: EC2Client, workspace: str | None, run_id: str | None) -> list[InstanceTypeDef]:
    """Return the instances of a workspace, or of all, that are not ending, of one run or of all."""
    by_state: FilterTypeDef = {"Name": "instance-state-name", "Values": list(LIVE_STATES)}
    return _described(client, [*own_filters(workspace, run_id), by_state])


def remembered_instances(
    client: EC2Client, workspace: str, instance_ids: Collection[str]
) -> list[InstanceTypeDef]:
    """Return the instances of a workspace in every state, and those with an id, also without our tags.

    EC2 forgets an instance about an hour after its end, and its tags sooner.
    """
    tagged = _described(client, own_filters(workspace, None))
    missing = sorted(set(instance_ids) - {instance["InstanceId"] for instance in tagged})
    return [*tagged, *_with_ids(client, missing)]


def vcpus_in_use(client: EC2Client) -> Counter[tuple[str, Market]]:
    """Return the vCPUs of all machines of an account that run or start in a region, by family and market.

    Quotas count those that a type has by default.
    """
    in_use: FilterTypeDef = {"Name": "instance-state-name", "Values": ["pending", "running"]}
    machines = Counter(
        (each["InstanceType"], Market.SPOT if each.get("InstanceLifecycle") == "spot" else Market.ON_DEMAND)
        for each in _described(client, [in_use])
    )
    names: FilterTypeDef = {"Name": "instance-type", "Values": sorted({name for name, _ in machines})}
    pages = client.get_paginator("describe_instance_types").paginate(Filters=[names]) if machines else ()
    sizes = {each["InstanceType"]: each["VCpuInfo"] for page in pages for each in page["InstanceTypes"]}
    used: Counter[tuple[str, Market]] = Counter()
    for (name, market), count in machines.items():
        used[name.partition(".")[0], market] += count * sizes[name]["DefaultVCpus"]
    return used


def describe_when_known(client: EC2Client, instance_ids: Sequence[str]) -> list[InstanceTypeDef]:
    """Return instances that were launched a moment ago, sorted by id; waits until EC2 knows them all.

    Raises:
        ProvisioningError: It does not in time.
    """
    for pause_s in (*passing.PAUSES_S, 0.0):
        known = list(_with_ids(client, instance_ids))
        if len(known) == len(instance_ids):
            return sorted(known, key=lambda instance: instance["InstanceId"])
        time.sleep(pause_s)
    missing = sorted(set(instance_ids) - {instance["InstanceId"] for instance in known})
    raise ProvisioningError(
        f"EC2 must know its own instances {', '.join(missing)} within {sum(passing.PAUSES_S):.0f} s, and does not; "
        f"what was launched is ended, try again"
    )


def is_ended(instance: InstanceTypeDef) -> bool:
    """Tell whether an instance has ended or is ending."""
    return instance["State"]["Name"] in ENDED_STATES


def _with_ids(client: EC2Client, instance_ids: Sequence[str]) -> Iterator[InstanceTypeDef]:
    # A filter, unlike the parameter for ids, is no error where one is not known.
    for start in range(0, len(instance_ids), _MAX_FILTER_VALUES):
        some = list(instance_ids[start : start + _MAX_FILTER_VALUES])
        yield from _described(client, [{"Name": "instance-id", "Values": some}])


def _described(client: EC2Client, filters: list[FilterTypeDef]) -> list[InstanceTypeDef]:
    pages = client.get_paginator("describe_instances").paginate(Filters=filters)
    return [i for page in pages for reservation in page["Reservations"] for i in reservation["Instances"]]


class Ec2Clock:
    """The time of the last answer to a client, counted on since."""

    def __init__(self, client: EC2Client) -> None:
        self._answered_at: datetime | None = None
        self._seen_s = 0.0
        client.meta.events.register("after-call.ec2", self._hear)

    @property
    def is_set(self) -> bool:
        """An answer with a time has come."""
        return self._answered_at is not None

    def now(self) -> datetime:
        """Return the time; this machine's while there was no answer."""
        if self._answered_at is None:
            return datetime.now(UTC)
        return self._answered_at + timedelta(seconds=time.monotonic() - self._seen_s)

    def _hear(self, http_response: Any, **_: Any) -> None:
        try:
            answered_at = parsedate_to_datetime(http_response.headers["Date"]).astimezone(UTC)
        except (KeyError, TypeError, ValueError):
            return
        here = datetime.now(UTC)
        self._answered_at = here if abs(answered_at - here) <= TOLERANCE else answered_at
        self._seen_s = time.monotonic()


def renew_lease_tags(client: EC2Client, instance_ids: Sequence[str], *, until: datetime) -> None:
    """Write the lease tag of instances, in one call where possible; missing instances are no error."""
    tags: list[TagTypeDef] = [{"Key": LEASE_TAG, "Value": until.isoformat()}]
    # EC2 refuses all for one that is gone.
    if instance_ids and is_refused(
        lambda: client.create_tags(Resources=list(instance_ids), Tags=tags), *GONE_CODES
    ):
        for instance_id in instance_ids if len(instance_ids) > 1 else ():
            renew_lease_tags(client, [instance_id], until=until)


def terminate_all(client: EC2Client, instance_ids: Sequence[str]) -> tuple[list[str], list[str]]:
    """Terminate instances, in one call where that goes, else one by one: one must not keep the others.

    Returns:
        Ids of those that were there, and what went wrong with others.
    """
    if not instance_ids:
        return [], []
    with suppress(ClientError, BotoCoreError):
        client.terminate_instances(InstanceIds=list(instance_ids))
        return list(instance_ids), []
    ended: list[str] = []
    problems: list[str] = []
    for instance_id in instance_ids:
        terminate = partial(client.terminate_instances, InstanceIds=[instance_id])
        try:
            with explained(f"terminate {instance_id}"):
                if not is_refused(terminate, *GONE_CODES):
                    ended.append(instance_id)
        except ProvisioningError as problem:
            problems.append(str(problem))
    return ended, problems
