"""The role of a run's nodes, which allows access to the bucket below their own run directory alone.

S3 knows the role of a machine and not its tags, so a run has a role of its own, in an instance profile of the same
name. Who may make roles could make any, so each carries a permissions boundary, without which IAM lets the controller
make none. IAM is one for all regions, and its lists show no tags: the path says whose a role is,
`/heterps/WORKSPACE/REGION/RUN/`, so that the sweep of one region leaves the runs of another alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from heterps_core.errors import ConfigurationError
from infra.providers.aws.errors import is_refused
from infra.providers.aws.tags import as_tag_list

BOUNDARY_VARIABLE = "HETERPS_AWS_NODE_BOUNDARY"
PROFILE_VARIABLE = "HETERPS_AWS_INSTANCE_PROFILE"

_POLICY_NAME = "run-directory"
_POLICY_FILE = Path(__file__).parents[2] / "iam" / "node.json"
_TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
    ],
}
_ARN = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:policy/\S+")
_DATA_FOLDER = re.compile(r"[A-Za-z0-9.-]+(/[A-Za-z0-9._=-]+)*")
_S3_LOCATION = re.compile(r"s3://(?P<bucket>[a-z0-9.-]+)/(?P<path>[A-Za-z0-9._/-]*[A-Za-z0-9._-])/?(\?.*)?")
"""Without what has a meaning of its own in a policy, as '*' and '$' have."""

_EXISTS_CODE = "EntityAlreadyExists"
_GONE_CODE = "NoSuchEntity"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRole:
    """A role, a profile or both that have one name."""

    name: str
    run_id: str
    made_at: datetime
    is_in_profile: bool


def check_boundary(boundary: str | None) -> str:
    """Return the ARN of the permissions boundary of roles.

    Raises:
        ConfigurationError: It is not set, or is none.
    """
    if boundary is None or not _ARN.fullmatch(boundary):
        raise ConfigurationError(
            f"nodes need a role for each run, within the permissions boundary that {BOUNDARY_VARIABLE} names by its "
            f"ARN or have the ready-made instance profile that {PROFILE_VARIABLE} names, got {boundary!r}; "
            f"export {BOUNDARY_VARIABLE}=arn:aws:iam::ACCOUNT_ID:policy/heterps-node   (docs/AWS.md makes it)"
        )
    return boundary


def is_in_s3(run_directory: str) -> bool:
    """Tell whether nodes need rights to a run directory that only a role can give."""
    return run_directory.startswith("s3://")


def node_policy(run_directory: str, data_folders: Collection[str] = ()) -> dict[str, Any]:
    """Return the policy of the nodes of one run.

    A run directory is for instance s3://bucket/heterps/night-1?region=us-east-1; data folders, such as
    clicks/raw, are read, which the boundary must allow, too.

    Raises:
        ConfigurationError: One cannot stand in a policy.
    """
    found = _S3_LOCATION.fullmatch(run_directory)
    if found is None:
        raise ConfigurationError(
            f"a run directory that nodes get rights to must be s3://BUCKET/PATH of letters, digits, '.', '_' and "
            f"'-', got {run_directory!r}; set HETERPS_RUN_STORE to one such as s3://bucket/heterps"
        )
    text = _POLICY_FILE.read_text()
    document: dict[str, Any] = json.loads(
        text.replace("RUN_BUCKET", found["bucket"]).replace("RUN_DIRECTORY", found["path"])
    )
    for folder in data_folders:
        if not _DATA_FOLDER.fullmatch(folder):
            raise ConfigurationError(
                f"a folder of rows that nodes get rights to must be BUCKET/PATH of letters, digits, '.', '_', '=' "
                f"and '-', got {folder!r}; rename it"
            )
    if data_folders:
        resources = [f"arn:aws:s3:::{folder}/*" for folder in data_folders]
        document["Statement"].append(
            {"Sid": "ReadTheRows", "Effect": "Allow", "Action": "s3:GetObject", "Resource": resources}
        )
    return document


def roles_path(workspace: str, region: str, run_id: str | None = None) -> str:
    """Return the path of the roles of one run, or of all runs of a region."""
    path = f"/heterps/{workspace}/{region}/"
    return path if run_id is None else f"{path}{run_id}/"


def role_name(path: str, *, attempt: int) -> str:
    """Return the name of the role of one attempt, at most 64 characters long.

    Names are unique in an account, whatever the path, and without regard to case. Each attempt has its own: EC2 may
    take a profile that is made again under its old name for the one that was deleted.
    """
    digest = hashlib.sha256(f"{path}{attempt}".encode()).hexdigest()
    return f"heterps-{path.split('/')[4][:40]}-{digest[:12]}"


def make_node_role(
    client: Any, name: str, *, path: str, boundary: str, policy: dict[str, Any], tags: dict[str, str]
) -> None:
    """Make a role within a boundary (its ARN), and a profile of the same name, path and tags; may be called again."""
    is_refused(
        lambda: client.create_role(
            RoleName=name,
            Path=path,
            AssumeRolePolicyDocument=json.dumps(_TRUST),
            PermissionsBoundary=boundary,
            Description="heterps: the nodes of one run",
            Tags=as_tag_list(tags),
        ),
        _EXISTS_CODE,
    )
    client.put_role_policy(RoleName=name, PolicyName=_POLICY_NAME, PolicyDocument=json.dumps(policy))
    is_refused(
        lambda: client.create_instance_profile(InstanceProfileName=name, Path=path, Tags=as_tag_list(tags)),
        _EXISTS_CODE,
    )
    is_refused(
        lambda: client.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name),
        # A profile holds one role, and nothing but this gives it one.
        "LimitExceeded",
    )


def delete_node_role(client: Any, role: NodeRole) -> None:
    """Delete a role and its profile, as far as they are there.

    Credentials that a node still has of it are refused from then on.
    """
    name = role.name
    calls: list[Callable[[], object]] = [
        lambda: client.delete_instance_profile(InstanceProfileName=name),
        lambda: client.delete_role_policy(RoleName=name, PolicyName=_POLICY_NAME),
        lambda: client.delete_role(RoleName=name),
    ]
    if role.is_in_profile:
        calls.insert(
            0, lambda: client.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=name)
        )
    for call in calls:
        is_refused(call, _GONE_CODE)


def own_node_roles(client: Any, path: str) -> list[NodeRole]:
    """Return the roles below a path, also where there is only the profile or only the role."""
    profiles = _listed(client, "instance_profiles", "InstanceProfile", path)
    roles = _listed(client, "roles", "Role", path)
    return [
        NodeRole(
            name=name,
            run_id=described["Path"].split("/")[4],
            made_at=described["CreateDate"],
            is_in_profile=bool(profiles.get(name, {}).get("Roles")),
        )
        for name, described in {**profiles, **roles}.items()
    ]


def _listed(client: Any, what: str, kind: str, path: str) -> dict[str, Any]:
    """Return the entries of IAM below a path, by name; the path is checked again, as entries may be deleted."""
    pages = client.get_paginator(f"list_{what}").paginate(PathPrefix=path)
    return {
        described[f"{kind}Name"]: described
        for page in pages
        for described in page[f"{kind}s"]
        if described["Path"].startswith(path)
    }
