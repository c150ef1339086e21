"""What IAM is asked for a request that was sent, after the table of actions, resources and condition keys for EC2
in the Service Authorization Reference; S3 likewise."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence

from tests.infra.iam import recorded_roles as roles
from tests.infra.iam.evaluation import ACCOUNT_ID, Access

ARN = f"arn:aws:ec2:us-east-1:{ACCOUNT_ID}"
OWN = {"aws:ResourceTag/heterps:workspace": "default", "aws:ResourceTag/heterps:run-id": "night-1"}
"""On what the code made; the test that sweeps sees to it that it touches nothing else."""


def ec2_accesses(requests: Sequence[Mapping[str, str]]) -> Iterator[Access]:
    """Yield what IAM is asked, request by request."""
    template_tags: dict[str, dict[str, str]] = {}
    machine: dict[str, str] = {}
    for request in requests:
        if request["Version"] == roles.VERSION:
            continue
        action = request["Action"]
        match action:
            case "CreateSecurityGroup":
                tags = _tags(request, "TagSpecification")["security-group"]
                yield Access(action="ec2:CreateSecurityGroup", resource=f"{ARN}:vpc/vpc-1")
                yield from _made("CreateSecurityGroup", "security-group", tags)
            case "CreateLaunchTemplate":
                template_tags = _tags(request, "LaunchTemplateData.TagSpecification")
                machine = {
                    "ec2:MetadataHttpTokens": request["LaunchTemplateData.MetadataOptions.HttpTokens"],
                    "ec2:Encrypted": request["LaunchTemplateData.BlockDeviceMapping.1.Ebs.Encrypted"],
                }
                tags = _tags(request, "TagSpecification")["launch-template"]
                yield from _made("CreateLaunchTemplate", "launch-template", tags)
            case "CreateFleet":
                yield from _fleet(_tags(request, "TagSpecification"), template_tags, machine)
            case "CreateTags":
                keys = [v for k, v in request.items() if re.fullmatch(r"Tag\.\d+\.Key", k)]
                context = {**OWN, "aws:TagKeys": keys}
                yield Access(action="ec2:CreateTags", resource=f"{ARN}:instance/i-1", context=context)
            case "AuthorizeSecurityGroupIngress" | "DeleteSecurityGroup":
                yield Access(action=f"ec2:{action}", resource=f"{ARN}:security-group/sg-1", context=OWN)
            case "DeleteLaunchTemplate":
                yield Access(action=f"ec2:{action}", resource=f"{ARN}:launch-template/lt-1", context=OWN)
            case "TerminateInstances":
                yield Access(action=f"ec2:{action}", resource=f"{ARN}:instance/i-1", context=OWN)
            case _:
                assert action.startswith("Describe"), f"{action} is not known here"
                yield Access(action=f"ec2:{action}", resource="*")


def s3_deletions(url: str, body: str) -> list[Access]:
    """Return what IAM is asked for a request that deletes the objects that its body names."""
    bucket = urllib.parse.urlsplit(url).path.strip("/")
    keys = re.findall(r"<Key>(.*?)</Key>", body)
    assert keys, f"no key in {body!r}"
    return [Access(action="s3:DeleteObject", resource=f"arn:aws:s3:::{bucket}/{key}") for key in keys]


def s3_access(method: str, url: str) -> Access:
    """Return what IAM is asked for a request to a bucket, addressed by path."""
    parts = urllib.parse.urlsplit(url)
    bucket, _, key = parts.path.lstrip("/").partition("/")
    query = urllib.parse.parse_qs(parts.query, keep_blank_values=True)
    if not key:
        assert method in ("GET", "HEAD"), f"{method} of a bucket is not known here"
        context = {"s3:prefix": query["prefix"][0]} if "prefix" in query else {}
        return Access(action="s3:ListBucket", resource=f"arn:aws:s3:::{bucket}", context=context)
    action = {
        "GET": "s3:GetObject",
        "HEAD": "s3:GetObject",
        "PUT": "s3:PutObject",
        "POST": "s3:PutObject",
        "DELETE": "s3:DeleteObject",
    }[method]
    return Access(action=action, resource=f"arn:aws:s3:::{bucket}/{key}")


def _fleet(
    fleet_tags: Mapping[str, Mapping[str, str]],
    template_tags: Mapping[str, Mapping[str, str]],
    machine: Mapping[str, str],
) -> Iterator[Access]:
    """A fleet of type instant launches with the rights of its caller."""
    yield from _made("CreateFleet", "fleet", fleet_tags["fleet"])
    for kind in ("instance", "volume"):
        requested = _as_requested(fleet_tags[kind])
        yield Access(action="ec2:CreateFleet", resource=f"{ARN}:{kind}/*", context=requested)
        tags = _as_requested({**template_tags[kind], **fleet_tags[kind]})
        yield Access(action="ec2:RunInstances", resource=f"{ARN}:{kind}/*", context={**tags, **machine})
        yield Access(
            action="ec2:CreateTags",
            resource=f"{ARN}:{kind}/i-1",
            context={**tags, "ec2:CreateAction": "RunInstances"},
        )
    for action in ("ec2:CreateFleet", "ec2:RunInstances"):
        for own in ("launch-template/lt-1", "security-group/sg-1"):
            yield Access(action=action, resource=f"{ARN}:{own}", context=OWN)
        for kind in ("subnet", "network-interface", "spot-instances-request"):
            yield Access(action=action, resource=f"{ARN}:{kind}/x-1")
        yield Access(action=action, resource="arn:aws:ec2:us-east-1::image/ami-1")
        yield Access(action=action, resource="arn:aws:ec2:us-east-1::snapshot/snap-1")
    yield Access(
        action="iam:CreateServiceLinkedRole",
        resource=f"arn:aws:iam::{ACCOUNT_ID}:role/aws-service-role/spot.amazonaws.com/AWSServiceRoleForEC2Spot",
        context={"iam:AWSServiceName": "spot.amazonaws.com"},
    )


def _made(action: str, kind: str, tags: Mapping[str, str]) -> Iterator[Access]:
    context = _as_requested(tags)
    yield Access(action=f"ec2:{action}", resource=f"{ARN}:{kind}/*", context=context)
    yield Access(
        action="ec2:CreateTags", resource=f"{ARN}:{kind}/x-1", context={**context, "ec2:CreateAction": action}
    )


def _as_requested(tags: Mapping[str, str]) -> dict[str, str]:
    return {f"aws:RequestTag/{key}": value for key, value in tags.items()}


def _tags(request: Mapping[str, str], prefix: str) -> dict[str, dict[str, str]]:
    """Return the tags of a request by the kind of resource."""
    found: dict[str, dict[str, str]] = {}
    for name, kind in request.items():
        if match := re.fullmatch(rf"{re.escape(prefix)}\.(\d+)\.ResourceType", name):
            tag = re.compile(rf"{re.escape(prefix)}\.{match[1]}\.Tag\.(\d+)\.Key")
            found[kind] = {
                request[key]: request[key.removesuffix("Key") + "Value"]
                for key in request
                if tag.fullmatch(key)
            }
    return found
