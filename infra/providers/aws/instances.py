"""What is done to instances once they are there: leases moved, machines ended, what stood beside them deleted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from heterps_core.errors import ProvisioningError
from infra.instances import moment_or_none
from infra.providers.aws.errors import GONE_CODES, explained, is_refused
from infra.providers.aws.launch_template import (
    delete_security_group,
    delete_template,
    own_security_groups,
    own_templates,
)
from infra.providers.aws.node_role import NodeRole, delete_node_role
from infra.providers.aws.tags import INTENDED_TAG, LEASE_TAG, RUN_TAG

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ec2.type_defs import TagTypeDef


def renew_lease_tags(client: EC2Client, instance_ids: Sequence[str], *, until: datetime) -> None:
    """Write the lease tag of instances, in one call where that goes; those that are gone are no error."""
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
