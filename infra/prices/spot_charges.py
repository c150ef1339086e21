"""What spot machines are charged: the price in effect as each of their hours begins, frozen once they have ended.

By AWS's words (EC2 user guide, "Billing for interrupted Spot Instances"; AWS news blog, November 2017, on the spot
pricing model) a Linux machine pays by the second the spot price in effect at the beginning of each instance-hour, and
nothing where EC2 interrupts it within its first hour; one that its owner ends then pays its seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from datetime import datetime, timedelta

from heterps_core.json_codec import JsonDocument
from heterps_core.units import SECONDS_PER_HOUR

HOUR = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotHistory:
    """Price changes of one instance type in one zone, oldest first."""

    times: tuple[datetime, ...]
    prices_usd_per_hour: tuple[float, ...]

    @property
    def last_usd_per_hour(self) -> float:
        """The price that holds now."""
        return self.prices_usd_per_hour[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotRecord(SpotHistory, JsonDocument):
    """What the cloud says of one spot machine that has ended; its prices begin before its launch."""

    source: str
    is_preempted: bool
    """The cloud ended it, neither we nor the machine itself."""

    ended_at: datetime | None
    """None where the cloud does not tell."""

    def price_at(self, moment: datetime) -> float:
        """Return the price in effect at a time."""
        return self.prices_usd_per_hour[max(bisect_right(self.times, moment) - 1, 0)]


def is_free(record: SpotRecord, *, launched_at: datetime, ended_at: datetime) -> bool:
    """Tell whether a machine is not charged, as the cloud took it within its first hour."""
    return record.is_preempted and ended_at - launched_at < HOUR


def spot_usd(record: SpotRecord, *, launched_at: datetime, seconds: float) -> float:
    """Return what a machine is charged for some seconds from its launch, hour by hour.

    usd = sum over hours h of min(3600, seconds - 3600 h) / 3600 * price(launched_at + h hours)
    """
    return sum(
        min(SECONDS_PER_HOUR, seconds - hour * SECONDS_PER_HOUR)
        / SECONDS_PER_HOUR
        * record.price_at(launched_at + hour * HOUR)
        for hour in range(math.ceil(seconds / SECONDS_PER_HOUR))
    )
