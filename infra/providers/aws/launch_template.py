"""The launch template and the security group that all machines of a run have in common.

A repeated launch finds the template, which holds the lease, by the run's name: a repeated fleet request is the
same to the letter, as its token demands. By the group machines reach one another, and nothing else reaches them.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from heterps_core.plans.provisioning_plan import TableDisk
from infra.ledger.ledger_entry import moment_or_none
from infra.prices.service_charges import disk_iops
from infra.providers.aws.errors import is_refused
from infra.providers.aws.node_role import NodeRole, delete_node_role
from infra.providers.aws.tags import INTENDED_TAG, RUN_TAG, as_dictionary, as_tag_list, own_filters

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ec2.type_defs import ImageTypeDef, RequestLaunchTemplateDataTypeDef

DISK_GB = 40
"""Room for the system, the environment and a slice of the data. Tables live in memory, and no shard of a checkpoint
or of a start model touches the disk: workers write and read them in the bucket, by ranges."""


def template_data(
    *,
    image: ImageTypeDef,
    security_group_id: str,
    first_boot: str,
    instance_profile: str | None,
    table_disk: TableDisk | None,
    tags: dict[str, str],
) -> RequestLaunchTemplateDataTypeDef:
    """Return a template: ends itself on shutdown, metadata with a session only, encrypted disk, no key."""
    tag_list = as_tag_list(tags)
    data: RequestLaunchTemplateDataTypeDef = {
        "ImageId": image["ImageId"],
        "UserData": base64.b64encode(first_boot.encode()).decode(),
        "SecurityGroupIds": [security_group_id],
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
        },
        "BlockDeviceMappings": [
            {
                "DeviceName": image["RootDeviceName"],
                "Ebs": {
                    "Encrypted": True,
                    "DeleteOnTermination": True,
                    "VolumeType": "gp3",
                    "VolumeSize": DISK_GB + (0 if table_disk is None else table_disk.gigabytes),
                    **(
                        {}
                        if table_disk is None
                        else {"Throughput": table_disk.mib_per_s, "Iops": disk_iops(table_disk.mib_per_s)}
                    ),
                },
            }
        ],
        "TagSpecifications": [
            {"ResourceType": "instance", "Tags": tag_list},
            {"ResourceType": "volume", "Tags": tag_list},
        ],
    }
    if instance_profile is not None:
        data["IamInstanceProfile"] = {"Name": instance_profile}
    return data


def make_template(
    client: EC2Client, name: str, data: RequestLaunchTemplateDataTypeDef, *, tags: dict[str, str]
) -> bool:
    """Make a template and tell whether it is new; one that is there stays as it is."""
    return not is_refused(
        lambda: client.create_launch_template(
            LaunchTemplateName=name,
            LaunchTemplateData=data,
            TagSpecifications=[{"ResourceType": "launch-template", "Tags": as_tag_list(tags)}],
        ),
        "InvalidLaunchTemplateName.AlreadyExistsException",
    )


def delete_template(client: EC2Client, name: str) -> bool:
    """Delete a template and tell whether it was there."""
    return not is_refused(
        lambda: client.delete_launch_template(LaunchTemplateName=name),
        "InvalidLaunchTemplateName.NotFoundException",
        "InvalidLaunchTemplateId.NotFound",
        "InvalidLaunchTemplateId.NotFoundException",
    )


def own_templates(
    client: EC2Client, workspace: str, run_id: str | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield name and tags of the templates of a workspace, of one run or of all."""
    pages = client.get_paginator("describe_launch_templates").paginate(Filters=own_filters(workspace, run_id))
    for template in (template for page in pages for template in page["LaunchTemplates"]):
        yield template["LaunchTemplateName"], as_dictionary(template.get("Tags", []))


def make_security_group(client: EC2Client, name: str, *, vpc_id: str, tags: dict[str, str]) -> str:
    """Make a group that lets in only its own members and return its id; may be called again."""
    try:
        group_id = client.create_security_group(
            GroupName=name,
            Description="heterps: the machines of one run reach one another",
            VpcId=vpc_id,
            TagSpecifications=[{"ResourceType": "security-group", "Tags": as_tag_list(tags)}],
        )["GroupId"]
    except ClientError as problem:
        if problem.response["Error"]["Code"] != "InvalidGroup.Duplicate":
            raise
        group_id = client.describe_security_groups(
            Filters=[{"Name": "group-name", "Values": [name]}, {"Name": "vpc-id", "Values": [vpc_id]}]
        )["SecurityGroups"][0]["GroupId"]
    is_refused(
        lambda: client.authorize_security_group_ingress(
            GroupId=group_id,
            IpPermissions=[{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]}],
        ),
        "InvalidPermission.Duplicate",
    )
    return group_id


def delete_security_group(client: EC2Client, group_id: str) -> bool:
    """Delete a group and tell whether this call did it; one that is still in use stays for the next sweep."""
    return not is_refused(
        lambda: client.delete_security_group(GroupId=group_id),
        "InvalidGroup.NotFound",
        "DependencyViolation",
        "InvalidGroup.InUse",
    )


def own_security_groups(
    client: EC2Client, workspace: str, run_id: str | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield id and tags of the groups of a workspace, of one run or of all."""
    pages = client.get_paginator("describe_security_groups").paginate(Filters=own_filters(workspace, run_id))
    for group in (group for page in pages for group in page["SecurityGroups"]):
        yield group["GroupId"], as_dictionary(group.get("Tags", []))


def remove_leftovers(
    client: EC2Client,
    iam: Any,
    workspace: str,
    roles: Sequence[NodeRole],
    *,
    live_run_ids: Collection[str],
    made_before: datetime,
) -> tuple[str, ...]:
    """Delete templates, security groups and roles of runs that do not live, and return their names.

    What does not say when it was made is of no launch that is under way.
    """

    def is_leftover(run_id: str, made_at: datetime | None) -> bool:
        return run_id not in live_run_ids and (made_at is None or made_at < made_before)

    def are_of_leftover(tags: dict[str, str]) -> bool:
        return is_leftover(tags[RUN_TAG], moment_or_none(tags[INTENDED_TAG]))

    templates = [
        name
        for name, tags in own_templates(client, workspace)
        if are_of_leftover(tags) and delete_template(client, name)
    ]
    groups = [
        group_id
        for group_id, tags in own_security_groups(client, workspace)
        if are_of_leftover(tags) and delete_security_group(client, group_id)
    ]
    old_roles = [role for role in roles if is_leftover(role.run_id, role.made_at)]
    for role in old_roles:
        delete_node_role(iam, role)
    return (*templates, *groups, *(role.name for role in old_roles))
