"""What a refresh makes of the answers of a cloud: new offers, and the older ones where there was no answer.

An answer for a region replaces all that was known of that region and market, so that what is no longer sold
is gone. Where it could not be asked, the offers that were known stay, with the age that they have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from heterps_core.errors import ProvisioningError
from heterps_core.hardware import InstanceOffer, InstanceType, Market
from infra.prices.live_prices import LAST_CHANGE, LivePrices


@dataclass(frozen=True, kw_only=True, slots=True)
class Refresh:
    """All offers after a refresh, and what went wrong in it."""

    offers: tuple[InstanceOffer, ...]
    num_new: int
    """Offers whose price is of this refresh; the others are as old as they say."""

    problems: tuple[str, ...]
    """One line for each question that the cloud did not answer."""

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

    Args:
        known: From earlier refreshes; their sizes are used where those cannot be asked for.
    """
    families = set(families)
    kept: dict[tuple[str, Market], list[InstanceOffer]] = defaultdict(list)
    for offer in known:
        kept[offer.region, offer.market].append(offer)
    new: list[InstanceOffer] = []
    problems: list[str] = []
    for region in regions:
        try:
            sizes = prices.sizes(region, families)
        except ProvisioningError as problem:
            problems.append(str(problem))
            sizes = {o.instance_type.name: o.instance_type for o in known if o.region == region}
        try:
            on_demand = prices.on_demand(region)
            kept.pop((region, Market.ON_DEMAND), None)
            new += [
                _offer(prices, sizes[name], on_demand[name], region=region, now=now)
                for name in sorted(on_demand.keys() & sizes.keys())
            ]
        except ProvisioningError as problem:
            problems.append(str(problem))
        try:
            histories = prices.spot(region, sorted(sizes), since=now - LAST_CHANGE) if sizes else {}
            kept.pop((region, Market.SPOT), None)
            new += [
                _offer(prices, sizes[name], history.last_usd_per_hour, region=region, now=now, spot_zone=zone)
                for (name, zone), history in sorted(histories.items())
                if name in sizes and history.last_usd_per_hour > 0
            ]
        except ProvisioningError as problem:
            problems.append(str(problem))
    older = [offer for offers in kept.values() for offer in offers]
    return Refresh(offers=(*older, *new), num_new=len(new), problems=tuple(problems))


def _offer(
    prices: LivePrices,
    size: InstanceType,
    usd_per_hour: float,
    *,
    region: str,
    now: datetime,
    spot_zone: str | None = None,
) -> InstanceOffer:
    return InstanceOffer(
        instance_type=size,
        region=region,
        zone=spot_zone,
        market=Market.SPOT if spot_zone else Market.ON_DEMAND,
        price_usd_per_hour=usd_per_hour,
        price_as_of=utc_text(now),
        price_source=prices.spot_source if spot_zone else prices.on_demand_source,
        cloud=prices.cloud,
    )


def utc_text(moment: datetime) -> str:
    """Return a time as prices carry it."""
    return moment.astimezone(UTC).isoformat(timespec="seconds")
