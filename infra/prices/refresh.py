"""What a refresh makes of the answers of AWS: new offers, and the older ones where there was no answer.

An answer for a region replaces all that was known of that region and market, so that what is no longer sold
is gone. Where AWS could not be asked, the offers that were known stay, with the age that they have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from heterps_core.errors import ProvisioningError
from heterps_core.hardware import AWS, DeviceKind, InstanceOffer, InstanceType, Market
from heterps_core.planning.provisioning.interruption_rate import rate_of_counts
from infra.prices.aws_prices import PRICING_SOURCE, AwsPrices
from infra.prices.interruptions import default_rate
from infra.providers.aws.spot_history import SPOT_SOURCE, SpotHistory


@dataclass(frozen=True, kw_only=True, slots=True)
class Refresh:
    """All offers after a refresh, and what went wrong in it."""

    offers: tuple[InstanceOffer, ...]
    num_new: int
    """Offers whose price is of this refresh; the others are as old as they say."""

    problems: tuple[str, ...]
    """One line for each question that AWS did not answer."""

    @property
    def num_kept(self) -> int:
        """Offers whose price could not be asked for again."""
        return len(self.offers) - self.num_new


def refresh(
    prices: AwsPrices,
    known: Sequence[InstanceOffer],
    *,
    regions: Iterable[str],
    families: Iterable[str],
    history: timedelta,
    now: datetime,
) -> Refresh:
    """Ask for all prices of some regions.

    Args:
        prices: Asks AWS.
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
        on_demand: dict[str, float] = {}
        try:
            on_demand = prices.on_demand(region)
            new += on_demand_offers(region, on_demand, sizes, now=now)
            kept.pop((region, Market.ON_DEMAND), None)
        except ProvisioningError as problem:
            problems.append(str(problem))
        try:
            histories = prices.spot(region, sorted(sizes), since=now - history) if sizes else {}
            new += spot_offers(region, histories, sizes, on_demand, now=now)
            kept.pop((region, Market.SPOT), None)
        except ProvisioningError as problem:
            problems.append(str(problem))
    older = [offer for offers in kept.values() for offer in offers]
    return Refresh(offers=(*older, *new), num_new=len(new), problems=tuple(problems))


def on_demand_offers(
    region: str, prices: Mapping[str, float], sizes: Mapping[str, InstanceType], *, now: datetime
) -> list[InstanceOffer]:
    """Return offers for the instance types of which price and size are known."""
    return [
        InstanceOffer(
            instance_type=sizes[name],
            region=region,
            zone=None,
            market=Market.ON_DEMAND,
            price_usd_per_hour=prices[name],
            price_as_of=utc_text(now),
            price_source=PRICING_SOURCE,
            cloud=AWS,
        )
        for name in sorted(prices.keys() & sizes.keys())
    ]


def spot_offers(
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
        rate, source = _interruptions(sizes[name], history, on_demand_usd_per_hour.get(name), now=now)
        offers.append(
            InstanceOffer(
                instance_type=sizes[name],
                region=region,
                zone=zone,
                market=Market.SPOT,
                price_usd_per_hour=history.last_usd_per_hour,
                price_as_of=utc_text(now),
                price_source=SPOT_SOURCE,
                cloud=AWS,
                interruptions_per_hour=rate,
                interruptions_source=source,
            )
        )
    return offers


def utc_text(moment: datetime) -> str:
    """Return a time as prices carry it."""
    return moment.astimezone(UTC).isoformat(timespec="seconds")


def _interruptions(
    instance_type: InstanceType, history: SpotHistory, on_demand: float | None, *, now: datetime
) -> tuple[float, str]:
    """Return the assumed rate, or that at which the price rose above on-demand where this is higher."""
    kind = DeviceKind.GPU if instance_type.accelerator_count else DeviceKind.CPU
    assumed, source = default_rate(AWS, kind)
    times_s, prices = history.curve(now)
    below = [int(price <= on_demand) for price in prices] if on_demand else []
    if not any(below[:-1]) or times_s[-1] == 0:
        return assumed.per_hour, source
    seen = rate_of_counts(times_s, below)
    if seen.per_hour <= assumed.per_hour:
        return assumed.per_hour, source
    return seen.per_hour, f"counted in {SPOT_SOURCE}: rose above on-demand {seen}"
