"""The launch template of a run: what all its machines have in common, their protection above all.

One per run, because user data and all that depends on the time (the lease) are in it. Its name is the run's, so that
a launch that is repeated finds it, and a repeated fleet request is the same to the letter, as its token demands.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from infra.providers.aws.tags import as_dictionary, as_tag_list, own_filters

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ec2.type_defs import ImageTypeDef, RequestLaunchTemplateDataTypeDef

DISK_GB = 40
"""Room for the system, the environment and a slice of the data. Tables live in memory, and no shard of a checkpoint
or of a start model touches the disk: workers write and read them in the bucket, by ranges."""

_EXISTS_CODE = "InvalidLaunchTemplateName.AlreadyExistsException"
_GONE_CODES = (
    "InvalidLaunchTemplateName.NotFoundException",
    "InvalidLaunchTemplateId.NotFound",
    "InvalidLaunchTemplateId.NotFoundException",
)


def template_data(
    *,
    image: ImageTypeDef,
    security_group_id: str,
    first_boot: str,
    instance_profile: str | None,
    key_name: str | None,
    tags: dict[str, str],
) -> RequestLaunchTemplateDataTypeDef:
    """Return a template: ends itself on shutdown, metadata with a session only, encrypted disk, no key by default."""
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
                    "VolumeSize": DISK_GB,
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
    if key_name is not None:
        data["KeyName"] = key_name
    return data


def make_template(
    client: EC2Client, name: str, data: RequestLaunchTemplateDataTypeDef, *, tags: dict[str, str]
) -> bool:
    """Make a template and tell whether it is new; one that is there stays as it is."""
    try:
        client.create_launch_template(
            LaunchTemplateName=name,
            LaunchTemplateData=data,
            TagSpecifications=[{"ResourceType": "launch-template", "Tags": as_tag_list(tags)}],
        )
    except ClientError as problem:
        if problem.response["Error"]["Code"] != _EXISTS_CODE:
            raise
        return False
    return True


def delete_template(client: EC2Client, name: str) -> bool:
    """Delete a template and tell whether it was there."""
    try:
        client.delete_launch_template(LaunchTemplateName=name)
    except ClientError as problem:
        if problem.response["Error"]["Code"] in _GONE_CODES:
            return False
        raise
    return True


def own_templates(
    client: EC2Client, workspace: str, run_id: str | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield name and tags of the templates of a workspace, of one run or of all."""
    pages = client.get_paginator("describe_launch_templates").paginate(Filters=own_filters(workspace, run_id))
    for page in pages:
        for template in page["LaunchTemplates"]:
            yield template["LaunchTemplateName"], as_dictionary(template.get("Tags", []))
