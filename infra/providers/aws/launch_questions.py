"""Questions about a launch that AWS answers free of charge: rights, network, types, quotas, keys, other owners."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from typing import Any

from heterps_core.errors import ConfigurationError, ProvisioningError
from heterps_core.hardware import Market
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
from infra.providers.aws.quotas import GRAPHICS, P5_SPOT, PARALLEL, STANDARD, Quota
from infra.providers.aws.tags import INTENDED_TAG, as_tag_list, workspace_of

_SMALL_TYPES = {"x86_64": "c5.large", "arm64": "c6g.large"}
"""Sold in every region."""

_QUOTAS = {"": STANDARD, " G and VT": GRAPHICS, " P": PARALLEL, " P5": {Market.SPOT: P5_SPOT}}
"""By their groups' names here."""

_ALLOWED = "DryRunOperation"


def _network(account: Account) -> str:
    return f"{account.network.vpc_id}, zones {', '.join(sorted(account.network.subnet_ids))}"


def _way_to_s3(account: Account) -> str:
    """Look for what leads from each zone's subnet to S3: endpoint, internet, NAT, another route, or none."""
    of_network = [{"Name": "vpc-id", "Values": [account.network.vpc_id]}]
    tables = account.ec2.describe_route_tables(Filters=of_network)["RouteTables"]
    # The main table has an association without a subnet.
    by_subnet = {
        each.get("SubnetId", each.get("Main")): table for table in tables for each in table["Associations"]
    }
    of_s3 = {"Name": "service-name", "Values": [f"com.amazonaws.{account.region}.s3"]}
    endpoints = account.ec2.describe_vpc_endpoints(Filters=[*of_network, of_s3])["VpcEndpoints"]
    with_endpoint = {table for each in endpoints for table in each.get("RouteTableIds", ())}
    ways = {}
    subnet_ids = [*account.network.subnet_ids.values()]
    for subnet in account.ec2.describe_subnets(SubnetIds=subnet_ids)["Subnets"]:
        table = by_subnet.get(subnet["SubnetId"]) or by_subnet[True]
        default = {route.get("DestinationCidrBlock"): route for route in table["Routes"]}.get("0.0.0.0/0", {})
        if table["RouteTableId"] in with_endpoint:
            way = "endpoint"
        elif default.get("GatewayId", "").startswith("igw-"):
            way = "internet" if subnet["MapPublicIpOnLaunch"] else "none"
        else:
            way = "NAT" if "NatGatewayId" in default else "another route" if default else "none"
        ways[subnet["AvailabilityZone"]] = way
    if cut_off := ", ".join(sorted(zone for zone, way in ways.items() if way == "none")):
        found = f"nodes need a way to S3, and {cut_off} has no endpoint, no NAT, and no public address with a gateway"
        raise ConfigurationError(f"{found}; {_endpoint(account)}")
    found = ", ".join(f"{zone} by {way}" for zone, way in sorted(ways.items()))
    return f"{found} (about 0.045 USD a GB; {_endpoint(account)})" if "NAT" in ways.values() else found


def _endpoint(account: Account) -> str:
    service, network = f"com.amazonaws.{account.region}.s3", account.network.vpc_id
    return f"aws ec2 create-vpc-endpoint --vpc-id {network} --service-name {service} --route-table-ids ...   (free)"


def _quota(account: Account, quota: Quota) -> str:
    found = account.client_of("service-quotas").get_service_quota(ServiceCode="ec2", QuotaCode=quota.code)
    vcpus, least = found["Quota"]["Value"], quota.least_vcpus
    if vcpus < least:
        found = f"the quota {quota.name} must be {least} vCPUs for its smallest machine, and is {vcpus:g}"
        raise ConfigurationError(f"{found}; {quota.request(account.region, 64 if least < 16 else 192)}")
    return f"{vcpus:g} vCPUs at a time"


def _default_key(account: Account) -> str:
    """Look at the key that encrypts volumes; that of AWS needs no rights."""
    key: str = account.ec2.get_ebs_default_kms_key_id()["KmsKeyId"]
    if key == "alias/aws/ebs":
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
            first_boot="",
            table_disk=None,
            tags=tags,
            instance_profile=machines.instance_profile,
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


LAUNCH_QUESTIONS = (
    Question(what="AWS network", ask=_network),
    Question(what="way to S3", ask=_way_to_s3),
    *(
        Question(
            what=f"quota of {market}{name}",
            ask=partial(_quota, quota=quota),
            worst=CheckState.NOTE if name or market is Market.SPOT else CheckState.MISSING,
        )
        for name, quotas in _QUOTAS.items()
        for market, quota in quotas.items()
    ),
    Question(what="key of volumes", ask=_default_key),
    Question(what="AWS may launch", ask=_rehearsal, is_right=True),
    Question(what="AWS may see node roles", ask=_node_roles, is_right=True),
    Question(what="rights of nodes", ask=_rights_of_nodes),
    Question(what="machines there", ask=_others, worst=CheckState.NOTE),
)
