"""How old prices are, in words: shown wherever a price is."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from heterps_core.hardware import InstanceOffer
from heterps_core.units import SECONDS_PER_HOUR
from infra.prices.price_catalogue import REFRESH_COMMAND

OLD_AFTER = timedelta(days=7)
"""Older prices are warned of: on-demand prices change a few times a year, spot prices within days."""

HOURS_PER_DAY = 24

logger = logging.getLogger(__name__)


def age_text(offers: Iterable[InstanceOffer], *, now: datetime) -> str:
    """Return how old the prices of offers are, for instance "prices 3 hours to 124 days old".

    Args:
        offers: At least one.
        now: With a time zone.
    """
    ages = [offer.price_age(now) for offer in offers]
    newest, oldest = _in_words(min(ages)), _in_words(max(ages))
    return f"prices {oldest} old" if newest == oldest else f"prices {newest} to {oldest} old"


def warn_of_old_prices(offers: Sequence[InstanceOffer], *, now: datetime) -> None:
    """Log a warning with the way out where a price is older than `OLD_AFTER`."""
    oldest = max(offers, key=lambda offer: offer.price_age(now))
    age = oldest.price_age(now)
    if age > OLD_AFTER:
        logger.warning(
            "the price of %s is %s old and may have changed (%s); get new ones with: %s",
            oldest.instance_type.name,
            _in_words(age),
            oldest.price_source,
            REFRESH_COMMAND,
        )


def _in_words(age: timedelta) -> str:
    hours = age.total_seconds() / SECONDS_PER_HOUR
    if hours < 1:
        return "less than an hour"
    if hours < 2 * HOURS_PER_DAY:
        return f"{hours:.0f} hours"
    return f"{hours / HOURS_PER_DAY:.0f} days"
