"""The prices of a purchase, asked for again right before it is launched: what is frozen is the newest price."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from heterps_core.errors import ProvisioningError
from heterps_core.hardware import InstanceOffer, Market
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from infra.prices.live_prices import LAST_CHANGE, LivePrices
from infra.prices.refresh import utc_text

MOVED_BY = 0.02
"""A price counts as moved beyond this share of it; spot prices move by less all the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recheck:
    """Which prices were asked for again, and which could not be."""

    offers: Mapping[InstanceOffer, InstanceOffer]
    """Offer as planned -> the same at its price of now."""

    problems: tuple[str, ...]
    """One line for each question that the cloud did not answer; those offers keep price and age."""

    @property
    def moves(self) -> tuple[str, ...]:
        """One line for each price that moved by more than `MOVED_BY`."""
        return tuple(
            f"{old.instance_type.name} in {old.place}, {old.market}: {old.price_usd_per_hour:.4f} -> "
            f"{new.price_usd_per_hour:.4f} USD/hour ({new.price_usd_per_hour / old.price_usd_per_hour - 1:+.0%})"
            for old, new in self.offers.items()
            if abs(new.price_usd_per_hour / old.price_usd_per_hour - 1) > MOVED_BY
        )

    def applied_to(self, plan: ProvisioningPlan) -> ProvisioningPlan:
        """Return a plan with the prices of now, alternatives in the order of those."""
        groups = tuple(
            replace(
                group,
                offer=self.offers.get(group.offer, group.offer),
                alternatives=tuple(
                    sorted(
                        (self.offers.get(offer, offer) for offer in group.alternatives),
                        key=lambda offer: offer.price_usd_per_hour,
                    )
                ),
            )
            for group in plan.groups
        )
        return replace(plan, groups=groups)


def recheck(prices: LivePrices, offers: Iterable[InstanceOffer], *, now: datetime) -> Recheck:
    """Ask for the prices of offers again: each type on-demand, and all pools of a region on spot at once."""
    found: dict[InstanceOffer, InstanceOffer] = {}
    problems: list[str] = []
    questions: dict[tuple[str, Market, str], list[InstanceOffer]] = defaultdict(list)
    for offer in offers:
        name = "" if offer.market is Market.SPOT else offer.instance_type.name
        questions[offer.region, offer.market, name].append(offer)
    for (region, market, name), same in questions.items():
        usd_per_hour: dict[tuple[str, str | None], float]
        try:
            if market is Market.SPOT:
                names = sorted({offer.instance_type.name for offer in same})
                histories = prices.spot(region, names, since=now - LAST_CHANGE)
                usd_per_hour = {pool: history.last_usd_per_hour for pool, history in histories.items()}
            else:
                on_demand = prices.on_demand(region, instance_type=name)
                usd_per_hour = {(each, None): usd for each, usd in on_demand.items()}
        except ProvisioningError as problem:
            problems.append(str(problem))
            continue
        for offer in same:
            pool = (offer.instance_type.name, offer.zone if market is Market.SPOT else None)
            if pool in usd_per_hour:
                found[offer] = replace(
                    offer,
                    price_usd_per_hour=usd_per_hour[pool],
                    price_as_of=utc_text(now),
                    price_source=prices.spot_source if market is Market.SPOT else prices.on_demand_source,
                )
            else:
                problems.append(f"{prices.cloud} names no {market} price of {pool[0]} in {offer.place}")
    return Recheck(offers=found, problems=tuple(problems))
