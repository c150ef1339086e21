"""How AWS decides on a request, as far as the shipped policies go: resources, the conditions they use, deny first.

After the "Policy evaluation logic" of the IAM User Guide and the condition operators of its JSON policy reference.
moto's own judge knows neither resources nor conditions of EC2.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.paths import PROJECT

IAM_FOLDER = PROJECT / "infra" / "iam"
ACCOUNT_ID = "123456789012"
NAMES = {
    "ACCOUNT_ID": ACCOUNT_ID,
    "WORKSPACE": "default",
    "RUN_BUCKET": "runs",
    "RUN_PREFIX": "heterps",
    "NODE_BOUNDARY": "heterps-node",
    "RUN_DIRECTORY": "heterps/*",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """One question to IAM: may this be done to that?"""

    action: str
    resource: str
    context: Mapping[str, str | Sequence[str]] = field(default_factory=dict)


def policy(name: str) -> dict[str, Any]:
    """Return a shipped policy with the names of an account filled in."""
    text = (IAM_FOLDER / f"{name}.json").read_text()
    for placeholder, value in NAMES.items():
        text = text.replace(placeholder, value)
    return json.loads(text)


def actions_of(document: Mapping[str, Any]) -> set[str]:
    """Return the actions that a policy allows."""
    allowing = [s for s in document["Statement"] if s["Effect"] == "Allow"]
    return {action for statement in allowing for action in _listed(statement["Action"])}


def is_allowed(document: Mapping[str, Any], access: Access) -> bool:
    """Tell whether a policy allows an access: some statement allows it, and none denies it."""
    effects = {statement["Effect"] for statement in document["Statement"] if _concerns(statement, access)}
    return effects == {"Allow"}


def _concerns(statement: Mapping[str, Any], access: Access) -> bool:
    return (
        any(fnmatch.fnmatchcase(access.action, pattern) for pattern in _listed(statement["Action"]))
        and any(fnmatch.fnmatchcase(access.resource, pattern) for pattern in _listed(statement["Resource"]))
        and all(
            _holds(operator, access.context.get(key), _listed(wanted))
            for operator, conditions in statement.get("Condition", {}).items()
            for key, wanted in conditions.items()
        )
    )


def _holds(operator: str, had: str | Sequence[str] | None, wanted: Sequence[str]) -> bool:
    match operator:
        case "StringEquals" | "Bool":
            return had in wanted
        case "StringNotEquals":
            return had not in wanted
        case "StringLike":
            return isinstance(had, str) and any(fnmatch.fnmatchcase(had, pattern) for pattern in wanted)
        case "ForAllValues:StringEquals":
            # True also where the request has none of these keys: never use it alone.
            return set(had or ()) <= set(wanted)
    raise AssertionError(f"the policies use {operator}, which is not known here")


def _listed(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else value
