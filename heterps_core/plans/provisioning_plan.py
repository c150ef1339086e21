"""The instances bought for each stage: the noun between a scheduling plan and a cluster.

A scheduling plan counts units, an invoice counts whole instances. This plan keeps both numbers, so that
what rounding up to whole instances costs is seen and not guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import InstanceOffer, Market
from heterps_core.json_codec import JsonDocument, JsonForm
from heterps_core.units import ratio


def _check_alternatives(offer: InstanceOffer, alternatives: Sequence[InstanceOffer]) -> None:
    """Check that offers may stand in for another in one launch: a fleet has one market, a plan one zone.

    Raises:
        ConfigurationError: One is of another region, zone or market, or is the offer itself.
    """
    place = (offer.region, offer.zone, offer.market)
    for other in alternatives:
        if other == offer or (other.region, other.zone, other.market) != place:
            raise ConfigurationError(
                f"an alternative to {offer.instance_type.name} must be another offer of its market in "
                f"{offer.zone or offer.region}, {offer.market}; got {other.instance_type.name} in "
                f"{other.zone or other.region}, {other.market}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TableDisk:
    """Room on the disk of an instance for rows of tables that memory does not hold."""

    gigabytes: int
    """Besides what every instance has, of 1e9 bytes."""

    mib_per_s: int
    """Read or written, of the whole disk."""

    usd_per_hour: float
    """Price of both, for one instance."""

    def __str__(self) -> str:
        """Say how large and fast it is, for people."""
        return f"an EBS volume of {self.gigabytes:,} GB more at {self.mib_per_s:,} MiB/s"


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

    alternatives: tuple[InstanceOffer, ...] = ()
    """Other offers that do the same work, cheapest first: to be tried where `offer` is not available."""

    table_disk: TableDisk | None = None
    """Of each instance; None where all rows are in memory or on instances' own disks."""

    def __post_init__(self) -> None:
        if self.count < 1 or self.units_per_instance < 1:
            raise ConfigurationError(
                f"a group needs at least 1 instance with at least 1 unit, got {self.count} instances of "
                f"{self.offer.instance_type.name} with {self.units_per_instance} units"
            )
        _check_alternatives(self.offer, self.alternatives)

    @property
    def price_usd_per_hour(self) -> float:
        """Price of all instances of the group."""
        return self.count * self.offer.price_usd_per_hour

    @property
    def highest_price_usd_per_hour(self) -> float:
        """Where all its instances are had as the most expensive alternative."""
        prices = [offer.price_usd_per_hour for offer in (self.offer, *self.alternatives)]
        return self.count * max(prices)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRequest:
    """One machine to be launched: what a provider is asked for."""

    node_id: str
    stage: int
    device_type: str
    offer: InstanceOffer
    num_workers: int
    """Replicas that run on it; fewer than its units where the stage does not need all."""

    alternatives: tuple[InstanceOffer, ...] = ()
    """Other offers that may be launched in place of `offer`, cheapest first."""

    table_disk: TableDisk | None = None

    @property
    def disk_usd_per_hour(self) -> float:
        """Price of its room for rows of tables, besides the offer's."""
        return 0.0 if self.table_disk is None else self.table_disk.usd_per_hour

    def with_offer(self, offer: InstanceOffer) -> NodeRequest:
        """Return the request for the offer that was really had, whose price is the one to freeze.

        Raises:
            ConfigurationError: It is neither the request's offer nor one of its alternatives.
        """
        if offer not in (self.offer, *self.alternatives):
            raise ConfigurationError(
                f"{self.node_id} must be launched as {self.offer.instance_type.name} or one of its "
                f"{len(self.alternatives)} alternatives, got {offer.instance_type.name}"
            )
        return replace(self, offer=offer, alternatives=())


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisioningPlan(JsonDocument):
    """The instances of every stage, with the price in whole instances and in units."""

    json_form = JsonForm(version=1, sums=("price_usd_per_hour", "rounding_usd_per_hour"))

    replicas: tuple[int, ...]
    """Replicas of each stage, in order; each occupies one unit."""

    groups: tuple[InstanceGroup, ...]
    """Ordered by stage; a stage may have several."""

    second_replicas: tuple[int, ...] = ()
    """Of these the last ones, which are on the stage's second device type; empty where no stage has one."""

    planned_price_usd_per_hour: float
    """Units needed times price per unit: what the planner counted with."""

    rendezvous_usd_per_hour: float = 0.0
    """Extra price of the rendezvous store's machine, which is bought on-demand in a plan that is all on spot."""

    node_ids: tuple[str, ...] = ()
    """Names of its machines in order, where they take the places of lost ones; by default by stage and number."""

    def __post_init__(self) -> None:
        unknown = {group.stage for group in self.groups} - set(range(len(self.replicas)))
        if unknown:
            raise ConfigurationError(
                f"groups name stages {sorted(unknown)}, the plan has {len(self.replicas)}"
            )
        if list(self.groups) != sorted(self.groups, key=lambda group: group.stage):
            raise ConfigurationError("groups must be ordered by stage")
        for stage, num_replicas in enumerate(self.replicas):
            parts = self.replicas_of(stage)
            if sum(parts.values()) != num_replicas or (num_replicas == 0 and not self.node_ids):
                raise ConfigurationError(
                    f"each stage must have an instance, and each replica a unit: {num_replicas} replicas of stage "
                    f"{stage}, {sum(parts.values())} of them on instances"
                )
            for name, needed in parts.items():
                groups = self._groups_of(stage, name)
                units = sum(group.count * group.units_per_instance for group in groups)
                machines = sum(group.count for group in groups)
                if not machines <= needed <= units:
                    raise ConfigurationError(
                        f"each instance of stage {stage} must have a replica, and each replica a unit: "
                        f"{needed} replicas on {machines} instances of {name} with {units} units"
                    )

    def replicas_of(self, stage: int) -> dict[str, int]:
        """Return the replicas of a stage on each of its device types, in order; empty where it has no machine."""
        names = dict.fromkeys(group.device_type for group in self.groups if group.stage == stage)
        second = self.second_replicas[stage] if self.second_replicas else 0
        return dict(zip(names, (self.replicas[stage] - second, second), strict=False))

    def _groups_of(self, stage: int, device_type: str) -> list[InstanceGroup]:
        return [each for each in self.groups if (each.stage, each.device_type) == (stage, device_type)]

    @property
    def machines(self) -> str:
        """The instances for people, such as "2 x c7i.large + 1 x g4dn.xlarge on spot"."""
        counts: Counter[InstanceOffer] = Counter()
        for group in self.groups:
            counts[group.offer] += group.count
        # Stages share this machine, where there is one.
        return " + ".join(
            f"{min(count, offer.count or count)} x {offer.instance_type.name}"
            f"{' on spot' * (offer.market is Market.SPOT)}"
            for offer, count in counts.items()
        )

    @property
    def price_usd_per_hour(self) -> float:
        """Price of all instances: what the provider bills."""
        return sum(group.price_usd_per_hour for group in self.groups)

    @property
    def rounding_usd_per_hour(self) -> float:
        """Price of whole instances beyond that of the planned units."""
        return self.price_usd_per_hour - self.planned_price_usd_per_hour - self.rendezvous_usd_per_hour

    @property
    def interruptions_per_hour(self) -> float:
        """Expected interruptions of all its instances; each stops the whole plan."""
        return sum(group.count * group.offer.interruptions_per_hour for group in self.groups)

    @property
    def offers(self) -> tuple[InstanceOffer, ...]:
        """All that may be bought for it, alternatives included, each once."""
        return tuple(
            dict.fromkeys(offer for group in self.groups for offer in (group.offer, *group.alternatives))
        )

    def within_price(self, max_usd_per_hour: float) -> ProvisioningPlan:
        """Return the plan without the alternatives that could bring it above a price, the most expensive first.

        What is left holds even where every group is had as its most expensive alternative.
        """
        groups = list(self.groups)
        while sum(group.highest_price_usd_per_hour for group in groups) > max_usd_per_hour:
            increases = [group.highest_price_usd_per_hour - group.price_usd_per_hour for group in groups]
            worst = increases.index(max(increases))
            if not groups[worst].alternatives:
                break
            groups[worst] = replace(groups[worst], alternatives=groups[worst].alternatives[:-1])
        return replace(self, groups=tuple(groups))

    def only(self, node_ids: Collection[str]) -> ProvisioningPlan:
        """Return the part of the plan that launches some of its machines again, in their places.

        Args:
            node_ids: At least one, as in `node_requests`.
        """
        machines = [group for group in self.groups for _ in range(group.count)]
        kept = [
            (group, request)
            for group, request in zip(machines, self.node_requests(), strict=True)
            if request.node_id in node_ids
        ]
        counts = Counter(id(group) for group, _ in kept)
        groups = tuple(replace(group, count=counts[id(group)]) for group in self.groups if counts[id(group)])
        price = sum(group.price_usd_per_hour for group in groups)
        counts_of: list[Counter[str]] = [Counter() for _ in self.replicas]
        for _, request in kept:
            counts_of[request.stage][request.device_type] += request.num_workers
        return replace(
            self,
            replicas=tuple(each.total() for each in counts_of),
            second_replicas=tuple(sum([*each.values()][1:]) for each in counts_of),
            groups=groups,
            planned_price_usd_per_hour=self.planned_price_usd_per_hour
            * ratio(price, self.price_usd_per_hour, otherwise=1.0),
            rendezvous_usd_per_hour=0.0,
            node_ids=tuple(request.node_id for _, request in kept),
        )

    def node_requests(self) -> tuple[NodeRequest, ...]:
        """Return the machines one by one, ordered by stage, replicas filled in instance by instance.

        Node ids depend on the plan alone, so that a repeated launch asks for the same nodes.
        """
        requests: list[NodeRequest] = []
        parts = [
            (stage, part) for stage in range(len(self.replicas)) for part in self.replicas_of(stage).items()
        ]
        for stage, (device_type, left) in parts:
            machines = [group for group in self._groups_of(stage, device_type) for _ in range(group.count)]
            for index, group in enumerate(machines):
                # Each later machine keeps at least one replica: an idle one could not join the run.
                num_workers = min(group.units_per_instance, left - (len(machines) - index - 1))
                left -= num_workers
                number = sum(request.stage == stage for request in requests)
                requests.append(
                    NodeRequest(
                        node_id=f"stage{stage}-node{number}",
                        stage=stage,
                        device_type=group.device_type,
                        offer=group.offer,
                        num_workers=num_workers,
                        alternatives=group.alternatives,
                        table_disk=group.table_disk,
                    )
                )
        if self.node_ids:
            names = zip(requests, self.node_ids, strict=True)
            requests = [replace(request, node_id=node_id) for request, node_id in names]
        return tuple(requests)

    @property
    def disk_usd_per_hour(self) -> float:
        """Price of all instances' room for rows of tables."""
        return sum(request.disk_usd_per_hour for request in self.node_requests())
