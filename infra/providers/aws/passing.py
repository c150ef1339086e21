"""The refusals of AWS that pass by themselves: one table, and one rule that repeats a call for two minutes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from time import monotonic
from typing import Any, NamedTuple

from botocore.exceptions import ConnectionError, HTTPClientError, SSLError

PAUSES_S = (1.0, 2.0, 4.0, *(5.0,) * 23)
"""Pauses between the repetitions of a call: 122 s together."""

LONGEST_S = 120.0
"""No repetition starts later after the first failure of a call, as an attempt that times out takes time itself."""


class Passing(NamedTuple):
    """A refusal that AWS takes back by itself."""

    code: str
    words: str
    """Part of the message, in lower case; empty for any message."""

    operations: tuple[str, ...]
    """Empty for any operation. CreateFleet stands also for the errors inside a fleet's answer."""

    longest_s: float
    """Longest time that the source reports."""

    source: str


_EVENTUAL = "Amazon EC2 API reference, Eventual consistency"
_STORM = "Amazon EC2 API reference, Request throttling: buckets fill again within a minute"
_SERVER = "Amazon EC2 API reference, Error codes: server errors"

_THROTTLED = ("RequestLimitExceeded", "Throttling", "ThrottlingException", "EC2ThrottledException")
_FAILED = ("InternalError", "InternalFailure", "ServiceFailure", "ServiceUnavailable", "Unavailable")
_UNCERTAIN = (*_FAILED, "500", "502", "503", "504")
"""Codes that leave open whether the request was executed; the numbers are those of a gateway before the service."""

_FLEET = ("CreateFleet",)
_GROUP = ("AuthorizeSecurityGroupIngress", "CreateFleet")

PASSING = (
    Passing("NoSuchEntity", "", ("PutRolePolicy",), 60.0, "hashicorp/terraform-provider-aws 6709, 18435"),
    Passing("NoSuchEntity", "", ("AddRoleToInstanceProfile",), 60.0, "hashicorp/terraform 2660, 7938"),
    Passing("EntityTemporarilyUnmodifiable", "", (), 60.0, "AWS IAM API reference, Common errors"),
    Passing("ConcurrentModification", "", (), 60.0, "AWS IAM API reference, Common errors"),
    Passing("InvalidParameterValue", "invalid iam instance profile", _FLEET, 120.0, "hashicorp/packer 9810"),
    Passing("InvalidParameterValue", "has no associated iam roles", _FLEET, 60.0, "hashicorp/terraform 2660"),
    Passing("InvalidGroup.NotFound", "", _GROUP, 60.0, f"SUSE-Enceladus/ec2imgutils 77; {_EVENTUAL}"),
    Passing("InvalidLaunchTemplateName.NotFoundException", "", _FLEET, 60.0, "4dn-dcic/tibanna 383"),
    Passing("InvalidLaunchTemplateId.NotFound", "", _FLEET, 60.0, "4dn-dcic/tibanna 383"),
    *(Passing(code, "", (), 60.0, _STORM) for code in _THROTTLED),
    *(Passing(code, "", (), 60.0, _SERVER) for code in _UNCERTAIN),
)

_was_answered = threading.Event()
"""To this process, once: a network that is away comes back, and before the first answer an address may be wrong."""


def is_passing(operation: str, code: str, message: str) -> bool:
    """Tell whether the answer of an operation passes by itself."""
    return any(
        code == entry.code
        and entry.words in message.lower()
        and (not entry.operations or operation in entry.operations)
        for entry in PASSING
    )


def repeat_passing(*clients: Any) -> None:
    """Let boto3's clients repeat each call with a refusal that passes, with the same request.

    A refused fleet is left to its launch, which repeats it under another token: to the token that it knows EC2 would
    answer as before. Where a fleet may have been made, the same token finds it.
    """
    for client in clients:
        service = client.meta.service_model.service_id.hyphenize()
        client.meta.events.register(f"needs-retry.{service}", _pause_before_repetition)


def _pause_before_repetition(
    response: tuple[object, Mapping[str, Any]] | None,
    operation: Any,
    attempts: int,
    request_dict: dict[str, Any],
    caught_exception: Exception | None = None,
    **_: object,
) -> float | None:
    """Return the pause before a call is repeated; None where its answer stands, or two minutes have passed."""
    if response is not None:
        _was_answered.set()
    error = response[1].get("Error", {}) if response else {}
    code = error.get("Code", "")
    if code:
        is_refused_fleet = operation.name == "CreateFleet" and code not in _UNCERTAIN
        passes = is_passing(operation.name, code, error.get("Message", "")) and not is_refused_fleet
    else:
        is_lost = isinstance(caught_exception, ConnectionError | HTTPClientError)
        passes = _was_answered.is_set() and is_lost and not isinstance(caught_exception, SSLError)
    # A request keeps its context over all its attempts.
    first_s = request_dict["context"].setdefault("heterps_first_failure_s", monotonic())
    is_over = attempts > len(PAUSES_S) or monotonic() - first_s >= LONGEST_S
    return PAUSES_S[attempts - 1] if passes and not is_over else None
