"""What a cloud is asked for: its prices of now, at a refresh of all of them, as before a plan that rents.

An answer for a region replaces all that was known of that region and market, so that what is no longer sold
is gone. Where it could not be asked, the offers that were known stay, with the age that they have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import ClassVar, Self

from heterps_core.errors import ProvisioningError
from heterps_core.hardware import InstanceOffer, InstanceType, Market
from infra.prices.service_charges import Rates
from infra.prices.spot_charges import SpotHistory

_LAST_CHANGE = timedelta(hours=1)
"""How far back the spot history is asked for; the price in force at its start is always in the answer."""


class LivePrices(ABC):
    """Asks one cloud; each method is one kind of question, and raises ProvisioningError without an answer."""

    cloud: ClassVar[str]
    on_demand_source: ClassVar[str]
    spot_source: ClassVar[str]

    @classmethod
    @abstractmethod
    def with_own_clients(cls) -> Self:
        """Return one with the cloud's own search for credentials.

        Raises:
            ProvisioningError: A client cannot be made.
        """

    @staticmethod
    @abstractmethod
    def regions_named(patterns: Sequence[str]) -> list[str]:
        """Return the cloud's regions that names, or patterns such as eu-*, stand for, without asking the cloud.

        Raises:
            UnknownNameError: There is no such region.
        """

    @abstractmethod
    def on_demand(self, region: str) -> Mapping[str, float]:
        """Return the USD per hour of each instance type of a region."""

    @abstractmethod
    def spot(
        self, region: str, instance_types: Sequence[str], *, since: datetime
    ) -> Mapping[tuple[str, str], SpotHistory]:
        """Return the history of each instance type and zone."""

    def rates(self, region: str, *, now: datetime) -> Rates:
        """Return the rates of services of a region, by their names in `service_charges.RATES`.

        Traffic to other regions has the names of `region_rates.traffic_to`. A missing rate is that of us-east-1.
        """
        return {}

    @abstractmethod
    def sizes(self, region: str, families: Iterable[str]) -> Mapping[str, InstanceType]:
        """Return the sizes of the instance types of some families, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refresh:
    """All offers after a refresh, and its problems."""

    offers: tuple[InstanceOffer, ...]
    num_new: int
    """Offers whose price is of this refresh; the others are as old as they say."""

    problems: tuple[str, ...]
    rates: Mapping[str, Rates]
    """Region -> rates of its services."""

    @property
    def num_kept(self) -> int:
        """Offers whose price could not be asked for again."""
        return len(self.offers) - self.num_new


def refresh(
    prices: LivePrices,
    known: Sequence[InstanceOffer],
    *,
    regions: Iterable[str],
    families: Iterable[str],
    now: datetime,
) -> Refresh:
    """Ask for all prices of some regions.

    Of offers that are `known` from earlier refreshes the sizes are used where those cannot be asked for.
    """
    families = set(families)
    renewed: set[tuple[str, Market]] = set()
    new: list[InstanceOffer] = []
    problems: list[str] = []
    rates: dict[str, Rates] = {}
    for region in regions:
        sizes: Mapping[str, InstanceType]
        sizes = {o.instance_type.name: o.instance_type for o in known if o.region == region}
        with _noted(problems):
            sizes = prices.sizes(region, families)
        with _noted(problems):
            on_demand = prices.on_demand(region)
            renewed.add((region, Market.ON_DEMAND))
            new += [
                _offer(prices, sizes[name], on_demand[name], region=region, now=now)
                for name in sorted(on_demand.keys() & sizes.keys())
            ]
        with _noted(problems):
            rates[region] = prices.rates(region, now=now)
        with _noted(problems):
            histories = prices.spot(region, sorted(sizes), since=now - _LAST_CHANGE) if sizes else {}
            renewed.add((region, Market.SPOT))
            new += [
                _offer(prices, sizes[name], history.last_usd_per_hour, region=region, now=now, spot_zone=zone)
                for (name, zone), history in sorted(histories.items())
                if name in sizes and history.last_usd_per_hour > 0
            ]
    older = [offer for offer in known if (offer.region, offer.market) not in renewed]
    return Refresh(offers=(*older, *new), num_new=len(new), problems=tuple(problems), rates=rates)


@contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    """Note that the cloud did not answer, in place of raising it."""
    try:
        yield
    except ProvisioningError as problem:
        problems.append(str(problem))


def _offer(
    prices: LivePrices,
    size: InstanceType,
    usd_per_hour: float,
    *,
    region: str,
    now: datetime,
    spot_zone: str | None = None,
) -> InstanceOffer:
    market = Market.SPOT if spot_zone else Market.ON_DEMAND
    return InstanceOffer(
        instance_type=size,
        region=region,
        zone=spot_zone,
        market=market,
        price_usd_per_hour=usd_per_hour,
        price_as_of=now.astimezone(UTC).isoformat(timespec="seconds"),
        price_source=prices.spot_source if spot_zone else prices.on_demand_source,
        cloud=prices.cloud,
    )
