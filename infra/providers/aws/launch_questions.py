"""Questions about a launch that AWS answers free of charge: rights, network, types, quotas, keys, other owners."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from typing import Any

from heterps_core.errors import ConfigurationError, ProvisioningError
from infra.checks import CheckState
from infra.providers.aws import queries
from infra.providers.aws.account import PROBE, Account, Question
from infra.providers.aws.errors import is_refused
from infra.providers.aws.launch_template import (
    delete_security_group,
    delete_template,
    make_security_group,
    make_template,
    template_data,
)
from infra.providers.aws.node_role import check_boundary, own_node_roles, roles_path
from infra.providers.aws.tags import INTENDED_TAG, as_tag_list, workspace_of

_SMALL_TYPES = {"x86_64": "c5.large", "arm64": "c6g.large"}
"""Sold in every region."""

_QUOTAS = {
    "on-demand": ("L-1216C47A", 2, "machines without cards"),
    "spot": ("L-34B43A08", 2, "spot machines without cards"),
    "on-demand G and VT": ("L-DB2E81BA", 4, "machines with cards"),
    "spot G and VT": ("L-3819A6DF", 4, "spot machines with cards"),
}
"""Code of the quota of vCPUs, those of the smallest machine, and what cannot be launched below."""

_OWN_KEY = "alias/aws/ebs"
_ALLOWED = "DryRunOperation"

_OF_ROLES = ("iam:CreateRole", "iam:PutRolePolicy", "iam:PassRole", "iam:DeleteRole")
"""What a launch and its end need beside the actions of dry runs."""


def _network(account: Account) -> str:
    return f"{account.network.vpc_id}, zones {', '.join(sorted(account.network.subnet_ids))}"


def _ways_to_s3(account: Account) -> dict[str, str]:
    """Return what leads from each zone's subnet to S3: endpoint, internet, NAT, another route, or none."""
    of_network = [{"Name": "vpc-id", "Values": [account.network.vpc_id]}]
    tables = account.ec2.describe_route_tables(Filters=of_network)["RouteTables"]
    # The main table has an association without a subnet.
    by_subnet = {each.get("SubnetId"): table for table in tables for each in table["Associations"]}
    of_s3 = {"Name": "service-name", "Values": [f"com.amazonaws.{account.region}.s3"]}
    endpoints = account.ec2.describe_vpc_endpoints(Filters=[*of_network, of_s3])["VpcEndpoints"]
    with_endpoint = {table for each in endpoints for table in each.get("RouteTableIds", ())}
    is_everywhere = any(each["VpcEndpointType"] == "Interface" for each in endpoints)
    ways = {}
    for subnet in account.subnets:
        table: Any = by_subnet.get(subnet["SubnetId"], by_subnet.get(None, {}))
        default: Any = next(
            (route for route in table.get("Routes", ()) if route.get("DestinationCidrBlock") == "0.0.0.0/0"),
            {},
        )
        is_internet = default.get("GatewayId", "").startswith("igw-")
        if is_everywhere or table.get("RouteTableId") in with_endpoint:
            way = "endpoint"
        elif is_internet:
            way = "internet" if subnet["MapPublicIpOnLaunch"] else "none"
        else:
            way = "NAT" if "NatGatewayId" in default else "another route" if default else "none"
        ways[subnet["AvailabilityZone"]] = way
    return ways


def _way_to_s3(account: Account) -> str:
    ways = _ways_to_s3(account)
    if cut_off := ", ".join(sorted(zone for zone, way in ways.items() if way == "none")):
        found = f"nodes need a way to S3, and {cut_off} has no endpoint, no NAT, and no public address with a gateway"
        raise ConfigurationError(f"{found}; {_endpoint(account)}")
    return ", ".join(f"{zone} by {way}" for zone, way in sorted(ways.items()))


def _cost_of_traffic(account: Account) -> str:
    if "NAT" in _ways_to_s3(account).values():
        raise ConfigurationError(f"NAT charges about 0.045 USD a GB to and from S3; {_endpoint(account)}")
    return "free"


def _endpoint(account: Account) -> str:
    service, network = f"com.amazonaws.{account.region}.s3", account.network.vpc_id
    return f"aws ec2 create-vpc-endpoint --vpc-id {network} --service-name {service} --route-table-ids ...   (free)"


def _types_sold(account: Account) -> str:
    zones = sorted(account.network.subnet_ids)
    in_zones = [{"Name": "location", "Values": zones}]
    asked = account.ec2.get_paginator("describe_instance_type_offerings")
    pages = asked.paginate(LocationType="availability-zone", Filters=in_zones)
    sold = Counter(each["Location"] for page in pages for each in page["InstanceTypeOfferings"])
    most = max(sold.values(), default=1)
    if poor := next((zone for zone in zones if 2 * sold[zone] < most), None):
        found = f"{poor} sells {sold[poor]} types of up to {most} in other zones"
        raise ConfigurationError(f"{found}; leave its subnet out of HETERPS_AWS_SUBNETS")
    return ", ".join(f"{zone} {sold[zone]}" for zone in zones)


def _quota(account: Account, name: str) -> str:
    code, least, lost = _QUOTAS[name]
    found = account.client_of("service-quotas").get_service_quota(ServiceCode="ec2", QuotaCode=code)
    vcpus = found["Quota"]["Value"]
    if vcpus < least:
        command = f"aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {code}"
        found = f"no {lost} can be launched with {vcpus:g} vCPUs, as the smallest has {least}"
        raise ConfigurationError(f"{found}; {command} --region {account.region} --desired-value 64")
    return f"{vcpus:g} vCPUs at a time"


def _key_pair(account: Account) -> str:
    if name := account.machines.key_name:
        account.ec2.describe_key_pairs(KeyNames=[name])
    return name or "none asked for"


def _default_key(account: Account) -> str:
    """Look at the key that encrypts volumes; that of AWS needs no rights."""
    key: str = account.ec2.get_ebs_default_kms_key_id()["KmsKeyId"]
    if key == _OWN_KEY:
        return key
    state = account.client_of("kms").describe_key(KeyId=key)["KeyMetadata"]["KeyState"]
    if state != "Enabled":
        found = f"the key that encrypts volumes by default must be enabled, and {key} is {state}"
        raise ConfigurationError(f"{found}; aws kms enable-key --key-id {key}")
    return f"{key}, which launches need kms:CreateGrant and kms:GenerateDataKeyWithoutPlaintext for"


def _others(account: Account) -> str:
    """Show the machines of other workspaces, which no command of this one ends."""
    own = account.machines.workspace
    counts = Counter(map(workspace_of, queries.live_instances(account.ec2, None, None)))
    found = f"{counts.pop(own, 0)} of workspace {own}"
    if not counts:
        return f"{found}, none of others"
    others = ", ".join(f"{count} of workspace {name}" for name, count in sorted(counts.items()))
    way_out = f"their owner ends them: HETERPS_AWS_WORKSPACE={min(counts)} heterps sweep --provider aws"
    raise ConfigurationError(f"{found}, {others}; {way_out}")


def _rehearsal(account: Account) -> str:
    """Make group and template of a launch, ask for its machine and its fleet as dry runs, and delete both."""
    ec2, machines = account.ec2, account.machines
    if not account.images:
        raise ProvisioningError("a launch needs an image; see the lines above")
    architecture, image = next(iter(account.images.items()))
    small, subnet = _SMALL_TYPES[architecture], next(iter(account.network.subnet_ids.values()))
    tags = {**machines.tags_for(PROBE), INTENDED_TAG: datetime.now(UTC).isoformat()}
    name = machines.name_for(PROBE)
    with ExitStack() as undo:
        group_id = make_security_group(ec2, name, vpc_id=account.network.vpc_id, tags=tags)
        undo.callback(delete_security_group, ec2, group_id)
        data = template_data(
            image=image,
            security_group_id=group_id,
            first_boot="#!/bin/sh",
            instance_profile=machines.instance_profile,
            key_name=machines.key_name,
            table_disk=None,
            tags=tags,
        )
        make_template(ec2, name, data, tags=tags)
        undo.callback(delete_template, ec2, name)
        of_name: Any = {"LaunchTemplateName": name, "Version": "$Default"}
        place: Any = {"InstanceType": small, "SubnetId": subnet}
        tagged: Any = [{"ResourceType": kind, "Tags": as_tag_list(tags)} for kind in ("instance", "fleet")]
        target: Any = {"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "on-demand"}
        machine: Any = {"LaunchTemplate": of_name, "TagSpecifications": tagged[:1], **place}
        fleet: Any = {"TargetCapacitySpecification": target, "TagSpecifications": tagged, "Type": "instant"}
        pools = [{"LaunchTemplateSpecification": of_name, "Overrides": [place]}]
        is_refused(lambda: ec2.run_instances(DryRun=True, MinCount=1, MaxCount=1, **machine), _ALLOWED)
        is_refused(lambda: ec2.create_fleet(DryRun=True, LaunchTemplateConfigs=pools, **fleet), _ALLOWED)
    return f"allowed (dry run of {small}; a group and a template were made and deleted)"


def _node_roles(account: Account) -> str:
    path = roles_path(account.machines.workspace, account.region)
    own_node_roles(account.client_of("iam"), path)
    return f"allowed, {path}"


def _rights_of_nodes(account: Account) -> str:
    """Look at the profile of all nodes, or at the boundary of their roles."""
    iam, name = account.client_of("iam"), account.machines.instance_profile
    if name is None:
        arn = check_boundary(account.machines.node_boundary)
        iam.get_policy(PolicyArn=arn)
        return f"boundary {arn}"
    if not iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Roles"]:
        way_out = f"aws iam add-role-to-instance-profile --instance-profile-name {name} --role-name ROLE"
        raise ConfigurationError(f"an instance profile must have a role, and {name} has none; {way_out}")
    return f"profile {name}"


def _simulated(account: Account) -> str:
    """Ask IAM whether roles could be made, for which there is no dry run."""
    who: str = account.client_of("sts").get_caller_identity()["Arn"]
    if who.endswith(":root") or account.machines.instance_profile is not None:
        return "not asked of the root user, nor with a ready-made profile"
    iam = account.client_of("iam")
    if ":assumed-role/" in who:
        who = iam.get_role(RoleName=who.split("/")[1])["Role"]["Arn"]
    path = roles_path(account.machines.workspace, account.region, PROBE)
    context = {
        "iam:PermissionsBoundary": account.machines.node_boundary or "none",
        "iam:PassedToService": "ec2.amazonaws.com",
    }
    results = iam.simulate_principal_policy(
        PolicySourceArn=who,
        ActionNames=list(_OF_ROLES),
        ResourceArns=[f"arn:aws:iam::{who.split(':')[4]}:role{path}{PROBE}"],
        ContextEntries=[
            {"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": "string"}
            for key, value in context.items()
        ],
    )["EvaluationResults"]
    if denied := [each["EvalActionName"] for each in results if each["EvalDecision"] != "allowed"]:
        ready = "name a ready-made profile in HETERPS_AWS_INSTANCE_PROFILE"
        way_out = f"attach infra/iam/controller.json to it, or {ready}"
        raise ConfigurationError(f"nodes need roles, and {who} may not {', '.join(denied)}; {way_out}")
    return f"{who} may make roles"


LAUNCH_QUESTIONS = (
    Question(what="AWS network", ask=_network),
    Question(what="way to S3", ask=_way_to_s3),
    Question(what="cost of S3's traffic", ask=_cost_of_traffic, worst=CheckState.NOTE),
    Question(what="types sold", ask=_types_sold, worst=CheckState.NOTE),
    Question(what="quota of on-demand", ask=partial(_quota, name="on-demand")),
    *(
        Question(what=f"quota of {name}", ask=partial(_quota, name=name), worst=CheckState.NOTE)
        for name in [*_QUOTAS][1:]
    ),
    Question(what="key pair", ask=_key_pair),
    Question(what="key of volumes", ask=_default_key),
    Question(what="AWS may launch", ask=_rehearsal, is_right=True),
    Question(what="AWS may see node roles", ask=_node_roles, is_right=True),
    Question(what="rights of nodes", ask=_rights_of_nodes),
    Question(what="AWS may make roles", ask=_simulated),
    Question(what="machines there", ask=_others, worst=CheckState.NOTE),
)
