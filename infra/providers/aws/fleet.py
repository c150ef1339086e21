"""Fleet requests of type instant: all machines of a group of equal nodes at once, in one zone, or none.

Machines of a request share their user data and are born without a node id: sorted instance ids are paired with the
group's node ids in cluster.json, where a node finds itself by its instance id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from heterps_core.device_types import get_device_type
from heterps_core.errors import ProvisioningError
from heterps_core.hardware import InstanceOffer, Market
from heterps_core.plans.provisioning_plan import NodeRequest, TableDisk
from infra.providers.aws.errors import refusal
from infra.providers.aws.queries import Network
from infra.providers.aws.tags import MAX_OFFERS, as_tag_list, group_tags
from infra.providers.base import InsufficientCapacityError

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetGroup:
    """Nodes of one stage that any of the same offers can be."""

    index: int
    requests: tuple[NodeRequest, ...]

    @property
    def offers(self) -> tuple[InstanceOffer, ...]:
        """What any of its nodes may be launched as, the planned one first; all of one zone and market."""
        first = self.requests[0]
        return (first.offer, *first.alternatives)[:MAX_OFFERS]

    @property
    def architecture(self) -> str:
        """Architecture of its machines: all offers carry one device type."""
        return get_device_type(self.requests[0].device_type).architecture

    @property
    def price_usd_per_hour(self) -> float:
        """Price of all nodes, as planned."""
        return len(self.requests) * self.offers[0].price_usd_per_hour

    @property
    def table_disk(self) -> TableDisk | None:
        """Further room on the volume of each of its nodes, for rows of tables."""
        return self.requests[0].table_disk

    def offer_of(self, instance_type: str) -> InstanceOffer:
        """Return the offer that an instance was launched from."""
        return next(offer for offer in self.offers if offer.instance_type.name == instance_type)

    def __str__(self) -> str:
        names = " or ".join(dict.fromkeys(offer.instance_type.name for offer in self.offers))
        return f"{len(self.requests)} x {names} for stage {self.requests[0].stage}"


def fleet_groups(requests: Sequence[NodeRequest]) -> tuple[FleetGroup, ...]:
    """Return the groups of neighbouring requests that one fleet request can launch."""
    runs = groupby(requests, key=lambda r: (r.stage, r.device_type, r.offer, r.alternatives, r.table_disk))
    return tuple(FleetGroup(index=i, requests=tuple(group)) for i, (_, group) in enumerate(runs))


def _client_token(run_id: str, *, attempt: int, group: int, repetition: int = 0) -> str:
    """Return the token that makes a repeated request buy nothing (64 characters at most).

    To a token that it knows EC2 answers as before: a request that is asked again after a refusal needs another.
    """
    of_refused = f"/{repetition}" if repetition else ""
    return hashlib.sha256(f"heterps/{run_id}/{attempt}/{group}{of_refused}".encode()).hexdigest()


def zones_for(
    group: FleetGroup, network: Network, *, zone: str | None, refused: Collection[str]
) -> dict[str, str]:
    """Return the subnets, by zone, that a group may be launched in.

    `zone` is that of the run's machines so far: traffic between zones is slow and costs.

    Raises:
        InsufficientCapacityError: There is none; another purchase may have another zone.
    """
    wanted = group.offers[0].zone or zone
    left = {
        name: subnet
        for name, subnet in network.subnet_ids.items()
        if name not in refused and wanted in (None, name)
    }
    if not left:
        raise InsufficientCapacityError(
            f"{group} must be launched in {wanted or 'a zone'} of {network.vpc_id}, whose zones are "
            f"{', '.join(sorted(network.subnet_ids))}, without {', '.join(sorted(refused)) or 'any'} that had no "
            f"capacity; try again later, plan with other instance types, or add a subnet to HETERPS_AWS_SUBNETS"
        )
    return left


def request_fleet(
    client: EC2Client,
    group: FleetGroup,
    *,
    template_name: str,
    subnet_ids: dict[str, str],
    run_id: str,
    attempt: int,
    repetition: int,
    owner_tags: dict[str, str],
) -> tuple[tuple[str, ...], ProvisioningError | None]:
    """Ask for all machines of a group in one zone; return the ids of launched ones, and why some are missing.

    EC2 may name refused pools beside machines that it did launch. There is no maximum price: it raises interruptions,
    and the planner holds the ceiling already.
    """
    count = len(group.requests)
    first = group.requests[0]
    is_spot = group.offers[0].market is Market.SPOT
    options: dict[str, Any] = {
        "AllocationStrategy": "price-capacity-optimized" if is_spot else "lowest-price",
        "SingleInstanceType": True,
        "SingleAvailabilityZone": True,
        "MinTargetCapacity": count,
    }
    tags = group_tags(
        group.index, attempt=attempt, stage=first.stage, device_type=first.device_type, offers=group.offers
    )
    request: dict[str, Any] = {
        "Type": "instant",
        "ClientToken": _client_token(run_id, attempt=attempt, group=group.index, repetition=repetition),
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {"LaunchTemplateName": template_name, "Version": "$Default"},
                "Overrides": [
                    {"InstanceType": offer.instance_type.name, "SubnetId": subnet}
                    for offer in group.offers
                    for subnet in subnet_ids.values()
                ],
            }
        ],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": count,
            "SpotTargetCapacity" if is_spot else "OnDemandTargetCapacity": count,
            "DefaultTargetCapacityType": "spot" if is_spot else "on-demand",
        },
        "SpotOptions" if is_spot else "OnDemandOptions": options,
        "TagSpecifications": [
            {"ResourceType": "instance", "Tags": as_tag_list({**owner_tags, **tags})},
            {"ResourceType": "volume", "Tags": as_tag_list(owner_tags)},
            {"ResourceType": "fleet", "Tags": as_tag_list(owner_tags)},
        ],
    }
    answer = client.create_fleet(**request)
    ids = tuple(i for launched in answer.get("Instances", []) for i in launched["InstanceIds"])
    codes: dict[str, list[str]] = {}
    for error in answer.get("Errors", []):
        codes.setdefault(error["ErrorCode"], []).append(error.get("ErrorMessage", ""))
    if len(ids) == count:
        return ids, None
    return ids, (
        refusal(f"launch {group}", codes, operation="CreateFleet")
        if codes
        else InsufficientCapacityError(
            f"AWS launched {len(ids)} of {group} and gave no reason; try again later"
        )
    )
