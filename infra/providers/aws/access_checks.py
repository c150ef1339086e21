"""Whether this machine can rent on AWS: credentials, image, network, permissions and run store, without buying."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import ARCHITECTURES
from infra.checks import Check, CheckState, tried
from infra.providers.aws.errors import explained, is_refused
from infra.providers.aws.launch_template import DISK_GB
from infra.providers.aws.node_role import check_boundary, own_node_roles, roles_path
from infra.providers.aws.queries import find_images, find_network
from infra.providers.aws.tags import as_tag_list
from infra.workspace import location_in_store

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

    from infra.providers.aws.launch import MachineSettings

_PROBE = "heterps-doctor"

_ALLOWED_CODE = "DryRunOperation"


def access_checks(client: EC2Client, machines: MachineSettings, *, iam: Any) -> Iterator[Check]:
    """Check with AWS that a launch would succeed; calls that make something are dry runs of AWS.

    A launch itself is not tried: what it may use (a group of the run) would have to be made first. Nor is a role, for
    which IAM knows no dry run.
    """
    region = client.meta.region_name
    credentials = _tried(
        "AWS credentials", lambda: client.describe_instances(MaxResults=5), found=f"accepted in {region}"
    )
    yield credentials
    if credentials.state is CheckState.OK:
        yield from _image_checks(client, machines.image_ids)
        yield _tried("AWS network", lambda: _network(client, machines.subnet_ids))
        tags = as_tag_list(machines.tags_for(_PROBE))
        dry_runs: dict[str, Callable[[], object]] = {
            "templates": lambda: client.create_launch_template(
                DryRun=True,
                LaunchTemplateName=_PROBE,
                LaunchTemplateData={"InstanceType": "t3.micro"},
                TagSpecifications=[{"ResourceType": "launch-template", "Tags": tags}],
            ),
            "groups": lambda: client.create_security_group(
                DryRun=True,
                GroupName=_PROBE,
                Description=_PROBE,
                VpcId=find_network(client, machines.subnet_ids).vpc_id,
                TagSpecifications=[{"ResourceType": "security-group", "Tags": tags}],
            ),
        }
        for what, call in dry_runs.items():
            refused = partial(is_refused, call, _ALLOWED_CODE)
            yield _tried(f"AWS may make {what}", refused, found="allowed (dry run)")
        path = roles_path(machines.workspace, region)
        yield _tried("AWS may see node roles", lambda: own_node_roles(iam, path), found=f"allowed, {path}")
        if name := machines.instance_profile:
            yield _tried(
                "node profile", lambda: iam.get_instance_profile(InstanceProfileName=name), found=name
            )
        else:
            yield _tried("node boundary", lambda: _boundary(iam, machines.node_boundary))
    yield _tried("run store", _see_run_store)


def _tried(what: str, ask: Callable[[], object], *, found: str | None = None) -> Check:
    with_errors = explained(f"answer the check {what!r}")
    return tried(what, with_errors(ask), found=found)


def _image_checks(client: EC2Client, image_ids: Sequence[str]) -> Iterator[Check]:
    """Yield a check for each architecture; one image is enough, as plans leave out the device types of the other."""
    checks = [
        _tried(
            f"AWS image of {name}",
            lambda name=name: _fitting_image(client, image_ids, name),  # type: ignore[misc]
        )
        for name in ARCHITECTURES
    ]
    has_one = any(check.state is CheckState.OK for check in checks)
    for check in checks:
        is_note = has_one and check.state is CheckState.MISSING
        yield replace(check, state=CheckState.NOTE) if is_note else check


def _fitting_image(client: EC2Client, image_ids: Sequence[str], architecture: str) -> str:
    image = find_images(client, image_ids, needed=[architecture])[architecture]
    root = image.get("RootDeviceName")
    disks = [disk for disk in image.get("BlockDeviceMappings", ()) if disk.get("DeviceName") == root]
    size_gb = max((disk["Ebs"].get("VolumeSize", 0) for disk in disks if "Ebs" in disk), default=0)
    if size_gb > DISK_GB:
        raise ConfigurationError(
            f"the snapshot of an image must fit the disk of {DISK_GB} GB that machines get, and that of "
            f"{image['ImageId']} has {size_gb} GB; make the image from an instance whose root volume is smaller"
        )
    return image["ImageId"]


def _network(client: EC2Client, subnet_ids: Sequence[str]) -> str:
    network = find_network(client, subnet_ids)
    return f"{network.vpc_id}, zones {', '.join(sorted(network.subnet_ids))}"


def _boundary(iam: Any, boundary: str | None) -> str:
    arn = check_boundary(boundary)
    iam.get_policy(PolicyArn=arn)
    return arn


def _see_run_store() -> str:
    """Ask the run store for something that is not there, which takes the right to list it."""
    from heterps_core.training.storage.run_directory import RunDirectory

    location = location_in_store(_PROBE)
    try:
        RunDirectory(location).exists("probe")
    except OSError as problem:
        raise ConfigurationError(
            f"{location} cannot be read: {problem}; check the bucket and its policy"
        ) from problem
    return location
