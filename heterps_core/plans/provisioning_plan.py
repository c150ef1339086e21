"""Which instances are bought for each stage: the noun between a scheduling plan and a cluster.

A scheduling plan counts units, an invoice counts whole instances. This plan keeps both numbers, so that
what rounding up to whole instances costs is seen and not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import InstanceOffer

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceGroup:
    """Instances of one offer that serve one stage."""

    stage: int
    """Index of the stage, counted from 0."""

    device_type: str
    offer: InstanceOffer
    count: int
    """Instances, at least 1."""

    units_per_instance: int
    """Units of the device type that one instance carries, at least 1."""

    def __post_init__(self) -> None:
        if self.count < 1 or self.units_per_instance < 1:
            raise ConfigurationError(
                f"a group needs at least 1 instance with at least 1 unit, got {self.count} instances of "
                f"{self.offer.instance_type.name} with {self.units_per_instance} units"
            )

    @property
    def price_usd_per_hour(self) -> float:
        """Of all instances of the group."""
        return self.count * self.offer.price_usd_per_hour

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> InstanceGroup:
        """Read the JSON form."""
        values = {name: document[name] for name in cls.__dataclass_fields__}
        return cls(**{**values, "offer": InstanceOffer.from_json(document["offer"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRequest:
    """One machine to be launched: what a provider is asked for."""

    node_id: str
    stage: int
    device_type: str
    offer: InstanceOffer
    num_workers: int
    """Replicas that run on it; fewer than its units where the stage does not need all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisioningPlan:
    """The instances of every stage, with the price in whole instances and in units."""

    replicas: tuple[int, ...]
    """Replicas of each stage, in order; each occupies one unit."""

    groups: tuple[InstanceGroup, ...]
    """Ordered by stage; a stage may have several."""

    planned_price_usd_per_hour: float
    """Units needed times price per unit: what the planner counted with."""

    def __post_init__(self) -> None:
        unknown = {group.stage for group in self.groups} - set(range(len(self.replicas)))
        if unknown:
            raise ConfigurationError(
                f"groups name stages {sorted(unknown)}, the plan has {len(self.replicas)}"
            )
        if list(self.groups) != sorted(self.groups, key=lambda group: group.stage):
            raise ConfigurationError("groups must be ordered by stage")
        for stage, needed in enumerate(self.replicas):
            groups = [group for group in self.groups if group.stage == stage]
            units = sum(group.count * group.units_per_instance for group in groups)
            machines = sum(group.count for group in groups)
            if not machines <= needed <= units or machines == 0:
                raise ConfigurationError(
                    f"each instance of stage {stage} must have a replica, and each replica a unit: "
                    f"{needed} replicas on {machines} instances with {units} units"
                )

    @property
    def price_usd_per_hour(self) -> float:
        """Of all instances: what the provider bills."""
        return sum(group.price_usd_per_hour for group in self.groups)

    @property
    def rounding_usd_per_hour(self) -> float:
        """What whole instances cost beyond the units that the plan counted with."""
        return self.price_usd_per_hour - self.planned_price_usd_per_hour

    def node_requests(self) -> tuple[NodeRequest, ...]:
        """Return the machines one by one, ordered by stage, replicas filled in instance by instance.

        Node ids depend on the plan alone, so that a repeated launch asks for the same nodes.
        """
        requests: list[NodeRequest] = []
        for stage, num_replicas in enumerate(self.replicas):
            left = num_replicas
            machines = [group for group in self.groups if group.stage == stage for _ in range(group.count)]
            for index, group in enumerate(machines):
                # Each later machine keeps at least one replica: an idle one could not join the run.
                num_workers = min(group.units_per_instance, left - (len(machines) - index - 1))
                left -= num_workers
                requests.append(
                    NodeRequest(
                        node_id=f"stage{stage}-node{index}",
                        stage=stage,
                        device_type=group.device_type,
                        offer=group.offer,
                        num_workers=num_workers,
                    )
                )
        return tuple(requests)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, with the sums for readers."""
        return {
            "schema_version": SCHEMA_VERSION,
            **asdict(self),
            "price_usd_per_hour": self.price_usd_per_hour,
            "rounding_usd_per_hour": self.rounding_usd_per_hour,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ProvisioningPlan:
        """Read the JSON form.

        Raises:
            ConfigurationError: The schema version is another one.
        """
        version = document.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ConfigurationError(
                f"a provisioning plan must have schema_version {SCHEMA_VERSION}, got {version!r}"
            )
        return cls(
            replicas=tuple(document["replicas"]),
            groups=tuple(InstanceGroup.from_json(group) for group in document["groups"]),
            planned_price_usd_per_hour=document["planned_price_usd_per_hour"],
        )
