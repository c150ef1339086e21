"""What a refresh makes of the answers of a cloud: new offers, and the older ones where there was no answer.

An answer for a region replaces all that was known of that region and market, so that what is no longer sold
is gone. Where it could not be asked, the offers that were known stay, with the age that they have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from heterps_core.errors import ProvisioningError
from heterps_core.hardware import DeviceKind, InstanceOffer, InstanceType, Market
from infra.prices.interruptions import InterruptionRate, default_rate, rate_of_counts
from infra.prices.live_prices import LivePrices, SpotHistory


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
    history: timedelta,
    now: datetime,
) -> Refresh:
    """Ask for all prices of some regions.

    Args:
        prices: Asks the cloud.
        known: From earlier refreshes; their sizes are used where those cannot be asked for.
        regions: For instance "us-east-1".
        families: Instance families that somebody may want.
        history: How far back spot prices are looked at for interruptions.
        now: The time of the new prices.
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
        on_demand: Mapping[str, float] = {}
        try:
            on_demand = prices.on_demand(region)
            new += _on_demand_offers(prices, region, on_demand, sizes, now=now)
            kept.pop((region, Market.ON_DEMAND), None)
        except ProvisioningError as problem:
            problems.append(str(problem))
        try:
            histories = prices.spot(region, sorted(sizes), since=now - history) if sizes else {}
            new += _spot_offers(prices, region, histories, sizes, on_demand, now=now)
            kept.pop((region, Market.SPOT), None)
        except ProvisioningError as problem:
            problems.append(str(problem))
    older = [offer for offers in kept.values() for offer in offers]
    return Refresh(offers=(*older, *new), num_new=len(new), problems=tuple(problems))


def _on_demand_offers(
    prices: LivePrices,
    region: str,
    usd_per_hour: Mapping[str, float],
    sizes: Mapping[str, InstanceType],
    *,
    now: datetime,
) -> list[InstanceOffer]:
    """Return offers for the instance types of which price and size are known."""
    return [
        InstanceOffer(
            instance_type=sizes[name],
            region=region,
            zone=None,
            market=Market.ON_DEMAND,
            price_usd_per_hour=usd_per_hour[name],
            price_as_of=utc_text(now),
            price_source=prices.on_demand_source,
            cloud=prices.cloud,
        )
        for name in sorted(usd_per_hour.keys() & sizes.keys())
    ]


def _spot_offers(
    prices: LivePrices,
    region: str,
    histories: Mapping[tuple[str, str], SpotHistory],
    sizes: Mapping[str, InstanceType],
    on_demand_usd_per_hour: Mapping[str, float],
    *,
    now: datetime,
) -> list[InstanceOffer]:
    """Return offers at the last price of each pool, with the interruptions that are to be expected."""
    offers = []
    for (name, zone), history in sorted(histories.items()):
        if name not in sizes or history.last_usd_per_hour <= 0:
            continue
        kind = DeviceKind.GPU if sizes[name].accelerator_count else DeviceKind.CPU
        rate, source = default_rate(prices.cloud, kind)
        seen = _seen_rate(history, on_demand_usd_per_hour.get(name), now=now)
        if seen is not None and seen.per_hour > rate.per_hour:
            rate, source = seen, f"counted in {prices.spot_source}: rose above on-demand {seen}"
        offers.append(
            InstanceOffer(
                instance_type=sizes[name],
                region=region,
                zone=zone,
                market=Market.SPOT,
                price_usd_per_hour=history.last_usd_per_hour,
                price_as_of=utc_text(now),
                price_source=prices.spot_source,
                cloud=prices.cloud,
                interruptions_per_hour=rate.per_hour,
                interruptions_source=source,
            )
        )
    return offers


def utc_text(moment: datetime) -> str:
    """Return a time as prices carry it."""
    return moment.astimezone(UTC).isoformat(timespec="seconds")


def _seen_rate(history: SpotHistory, on_demand: float | None, *, now: datetime) -> InterruptionRate | None:
    """Return how often the price rose above on-demand; None where it was never below."""
    times_s, prices = history.curve(now)
    below = [int(price <= on_demand) for price in prices] if on_demand else []
    if not any(below):
        return None
    rate = rate_of_counts(times_s, below)
    return rate if rate.instance_hours > 0 else None
