"""The security group of a run: its machines reach one another, and nobody else reaches them.

One per run, so that two runs are strangers to each other and a run's end needs no look at the others. The flow's
host is not in it: it meets the nodes in the run directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from infra.providers.aws.tags import as_dictionary, as_tag_list, own_filters

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

_EXISTS_CODE = "InvalidGroup.Duplicate"
_RULE_EXISTS_CODE = "InvalidPermission.Duplicate"
_GONE_CODE = "InvalidGroup.NotFound"
_IN_USE_CODES = ("DependencyViolation", "InvalidGroup.InUse")


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
        if problem.response["Error"]["Code"] != _EXISTS_CODE:
            raise
        group_id = client.describe_security_groups(
            Filters=[{"Name": "group-name", "Values": [name]}, {"Name": "vpc-id", "Values": [vpc_id]}]
        )["SecurityGroups"][0]["GroupId"]
    try:
        client.authorize_security_group_ingress(
            GroupId=group_id,
            IpPermissions=[{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]}],
        )
    except ClientError as problem:
        if problem.response["Error"]["Code"] != _RULE_EXISTS_CODE:
            raise
    return group_id


def delete_security_group(client: EC2Client, group_id: str) -> bool:
    """Delete a group and tell whether this call did it; one that is still in use stays for the next sweep."""
    try:
        client.delete_security_group(GroupId=group_id)
    except ClientError as problem:
        if problem.response["Error"]["Code"] in (_GONE_CODE, *_IN_USE_CODES):
            return False
        raise
    return True


def own_security_groups(client: EC2Client, workspace: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield id and tags of the groups of a workspace."""
    pages = client.get_paginator("describe_security_groups").paginate(Filters=own_filters(workspace, None))
    for page in pages:
        for group in page["SecurityGroups"]:
            yield group["GroupId"], as_dictionary(group.get("Tags", []))
