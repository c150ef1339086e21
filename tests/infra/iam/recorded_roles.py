"""What IAM is asked for the requests that concern roles and profiles, after its table in the Service Authorization
Reference: to tag what is made is a right of its own, and so is to pass a role to a profile and to machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tests.infra.iam.evaluation import ACCOUNT_ID, Access

VERSION = "2010-05-08"
"""Of IAM's requests, unlike EC2's."""


def role_accesses(requests: Sequence[Mapping[str, str]]) -> Iterator[Access]:
    """Yield what IAM is asked, request by request; those that do not concern roles ask nothing here."""
    made: dict[str, Mapping[str, str]] = {}
    """Role and profile have one name and one path."""
    for request in requests:
        match request["Action"]:
            case "CreateLaunchTemplate":
                in_template = made[request["LaunchTemplateData.IamInstanceProfile.Name"]]
            case "CreateFleet":
                yield _passed(in_template)
            case "ListRoles" | "ListInstanceProfiles" as action:
                yield Access(action=f"iam:{action}", resource="*")
            case "CreateRole":
                made[request["RoleName"]] = request
                yield _of_role("CreateRole", request)
                yield Access(action="iam:TagRole", resource=_of_role("", request).resource)
            case "PutRolePolicy" | "DeleteRolePolicy" | "DeleteRole" as action:
                yield _of_role(action, made[request["RoleName"]])
            case "CreateInstanceProfile":
                yield _of_profile("CreateInstanceProfile", request)
                yield _of_profile("TagInstanceProfile", request)
            case "AddRoleToInstanceProfile":
                yield _of_profile("AddRoleToInstanceProfile", _named(request, made))
                yield _passed(made[request["RoleName"]])
            case "RemoveRoleFromInstanceProfile" | "DeleteInstanceProfile" as action:
                yield _of_profile(action, _named(request, made))
            case action:
                assert request["Version"] != VERSION, f"{action} is not known here"


def role_arn(path: str, name: str) -> str:
    """Return the ARN of a role."""
    return f"arn:aws:iam::{ACCOUNT_ID}:role{path}{name}"


def _named(request: Mapping[str, str], made: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    name = request["InstanceProfileName"]
    return {"InstanceProfileName": name, "Path": made[name]["Path"]}


def _of_role(action: str, role: Mapping[str, str]) -> Access:
    """Each of these requests is judged by the boundary of its role, too."""
    return Access(
        action=f"iam:{action}",
        resource=role_arn(role["Path"], role["RoleName"]),
        context={"iam:PermissionsBoundary": role["PermissionsBoundary"]},
    )


def _of_profile(action: str, profile: Mapping[str, str]) -> Access:
    name = f"{profile['Path']}{profile['InstanceProfileName']}"
    return Access(action=f"iam:{action}", resource=f"arn:aws:iam::{ACCOUNT_ID}:instance-profile{name}")


def _passed(role: Mapping[str, str]) -> Access:
    return Access(
        action="iam:PassRole",
        resource=role_arn(role["Path"], role["RoleName"]),
        context={"iam:PassedToService": "ec2.amazonaws.com"},
    )
