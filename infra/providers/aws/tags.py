"""The tags of every machine: its owner, lease and price, from which a lost ledger is rebuilt.

The tags are in the call that launches. An EC2 resource holds 50 of them, and a value 256 characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import InstanceOffer, Market
from infra.ledger.ledger_entry import Instance, LaunchTerms, moment_or_none

if TYPE_CHECKING:
    from mypy_boto3_ec2.type_defs import FilterTypeDef, InstanceTypeDef, TagTypeDef

RUN_TAG = "heterps:run-id"
_WORKSPACE_TAG = "heterps:workspace"
INTENDED_TAG = "heterps:intended-at"
LEASE_TAG = "heterps:lease-until"
_ATTEMPT_TAG = "heterps:attempt"
_GROUP_TAG = "heterps:group"
_STAGE_TAG = "heterps:stage"
_DEVICE_TYPE_TAG = "heterps:device-type"
_MARKET_TAG = "heterps:market"
DISK_PRICE_TAG = "heterps:disk-usd-per-hour"
_PRICE_TAG_PREFIX = "heterps:price/"
"""Before the name of an instance type: a fleet request may have any of several."""

_PREEMPTED_CODE = "Server.SpotInstanceTermination"

MAX_OFFERS = 30

_MAX_VALUE_CHARACTERS = 256
ENDED_STATES = ("shutting-down", "terminated")
"""Neither is billed."""


def owner_tags(run_id: str, *, workspace: str) -> dict[str, str]:
    """Return the tags of everything that a run makes; the IAM policies let the controller touch nothing else."""
    return {RUN_TAG: run_id, _WORKSPACE_TAG: workspace}


def own_tags(text: str) -> dict[str, str]:
    """Return tags from a text such as "team=ads cost-centre=4711".

    Raises:
        ConfigurationError: A word is no KEY=VALUE, or a key is one of ours or of AWS.
    """
    tags = {}
    for word in text.split():
        key, mark, value = word.partition("=")
        if not mark or not key or key.startswith(("heterps:", "aws:")):
            raise ConfigurationError(
                f"HETERPS_AWS_TAGS must be KEY=VALUE words whose keys begin with neither heterps: nor aws:, got "
                f"{word!r}; write for instance team=ads"
            )
        tags[key] = value
    return tags


def group_tags(
    index: int, *, attempt: int, stage: int, device_type: str, offers: Sequence[InstanceOffer]
) -> dict[str, str]:
    """Return the tags of the machines of one fleet request; they depend on the plan alone."""
    prices = {
        f"{_PRICE_TAG_PREFIX}{offer.instance_type.name}": (
            f"{offer.price_usd_per_hour!r} {offer.price_as_of} {offer.price_source}"[:_MAX_VALUE_CHARACTERS]
        )
        for offer in offers
    }
    return {
        _ATTEMPT_TAG: str(attempt),
        _GROUP_TAG: str(index),
        _STAGE_TAG: str(stage),
        _DEVICE_TYPE_TAG: device_type,
        _MARKET_TAG: offers[0].market,
        **prices,
    }


def as_tag_list(tags: dict[str, str]) -> list[TagTypeDef]:
    """Return tags as boto3 takes them."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def as_dictionary(tag_list: Sequence[TagTypeDef]) -> dict[str, str]:
    """Return tags as a dictionary; run, intent and lease are empty where they are missing."""
    tags = {tag["Key"]: tag["Value"] for tag in tag_list}
    return {RUN_TAG: "", INTENDED_TAG: "", LEASE_TAG: "", **tags}


def own_filters(workspace: str | None, run_id: str | None) -> list[FilterTypeDef]:
    """Return the filters that find the resources of a run, or of every run of the workspace, or of all workspaces."""
    by_run: FilterTypeDef = (
        {"Name": "tag-key", "Values": [RUN_TAG]}
        if run_id is None
        else {"Name": f"tag:{RUN_TAG}", "Values": [run_id]}
    )
    if workspace is None:
        return [by_run]
    return [by_run, {"Name": f"tag:{_WORKSPACE_TAG}", "Values": [workspace]}]


def instance_of(described: InstanceTypeDef, *, region: str) -> Instance:
    """Return an instance from its description by EC2."""
    tags = as_dictionary(described.get("Tags", []))
    is_ended = described["State"]["Name"] in ENDED_STATES
    return Instance(
        provider_instance_id=described["InstanceId"],
        run_id=tags[RUN_TAG],
        instance_type=described["InstanceType"],
        launched_at=described["LaunchTime"],
        is_ended=is_ended,
        ended_at=_end_of(described.get("StateTransitionReason", "")) if is_ended else None,
        ended_because=end_text(described) if is_ended else "",
        is_preempted=described.get("StateReason", {}).get("Code") == _PREEMPTED_CODE,
        lease_until=moment_or_none(tags[LEASE_TAG]),
        terms=_terms_of(described, tags, region=region),
    )


def end_text(described: Mapping[str, Any]) -> str:
    """Return why an instance ended, in EC2's words: its StateReason; empty where EC2 gives none."""
    reason = described.get("StateReason", {})
    return str(reason.get("Message") or reason.get("Code", ""))


def workspace_of(described: InstanceTypeDef) -> str:
    """Return the workspace that owns an instance."""
    return as_dictionary(described.get("Tags", [])).get(_WORKSPACE_TAG, "")


def attempt_of(described: InstanceTypeDef) -> int:
    """Return the attempt that launched an instance."""
    return int(as_dictionary(described.get("Tags", [])).get(_ATTEMPT_TAG, "1"))


def group_of(described: InstanceTypeDef) -> int | None:
    """Return the index of the group that an instance was launched for."""
    text = as_dictionary(described.get("Tags", [])).get(_GROUP_TAG)
    return None if text is None else int(text)


def _terms_of(described: InstanceTypeDef, tags: dict[str, str], *, region: str) -> LaunchTerms | None:
    try:
        price, as_of, source = tags[f"{_PRICE_TAG_PREFIX}{described['InstanceType']}"].split(" ", 2)
        return LaunchTerms(
            attempt=int(tags[_ATTEMPT_TAG]),
            stage=int(tags[_STAGE_TAG]),
            device_type=tags[_DEVICE_TYPE_TAG],
            market=Market(tags[_MARKET_TAG]),
            region=region,
            price_usd_per_hour=float(price),
            price_as_of=as_of,
            price_source=source,
            intended_at=moment_or_none(tags[INTENDED_TAG]) or described["LaunchTime"],
            disk_usd_per_hour=float(tags.get(DISK_PRICE_TAG, 0.0)),
        )
    except (KeyError, ValueError):
        return None


def _end_of(state_transition_reason: str) -> datetime | None:
    """Return the time that EC2 gives with the reason of a state, as in "User initiated (2026-07-20 04:30:00 GMT)"."""
    found = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)", state_transition_reason)
    return datetime.fromisoformat(found[1]).replace(tzinfo=UTC) if found else None
