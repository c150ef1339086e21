"""What spot machines of a type and zone cost over time, as EC2 publishes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from infra.prices.spot_charges import SpotRecord
from infra.providers.aws.tags import end_of

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ec2.type_defs import InstanceTypeDef

SPOT_PRODUCT = "Linux/UNIX"
SPOT_SOURCE = "EC2 DescribeSpotPriceHistory, Linux/UNIX"

PREEMPTED_CODE = "Server.SpotInstanceTermination"
"""StateReason of a machine that EC2 took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotHistory:
    """Price changes of one instance type in one zone, oldest first."""

    times: tuple[datetime, ...]
    prices_usd_per_hour: tuple[float, ...]

    @property
    def last_usd_per_hour(self) -> float:
        """The price that holds now."""
        return self.prices_usd_per_hour[-1]

    def curve(self, until: datetime) -> tuple[list[float], list[float]]:
        """Return the step curve up to a time: seconds from the first change, and the price from then on."""
        moments = [*self.times, max(until, self.times[-1])]
        seconds = [(moment - self.times[0]).total_seconds() for moment in moments]
        return seconds, [*self.prices_usd_per_hour, self.last_usd_per_hour]


def spot_histories(
    client: EC2Client, names: Sequence[str], *, since: datetime
) -> dict[tuple[str, str], SpotHistory]:
    """Return (instance type, zone) -> price changes since a time, the one in force at that time included."""
    pages = client.get_paginator("describe_spot_price_history").paginate(
        InstanceTypes=list(names),  # type: ignore[arg-type]
        ProductDescriptions=[SPOT_PRODUCT],
        StartTime=since,
    )
    changes: dict[tuple[str, str], dict[datetime, float]] = defaultdict(dict)
    for page in pages:
        for row in page["SpotPriceHistory"]:
            changes[row["InstanceType"], row["AvailabilityZone"]][row["Timestamp"]] = float(row["SpotPrice"])
    return {
        pool: SpotHistory(
            times=tuple(sorted(by_time)),
            prices_usd_per_hour=tuple(by_time[time] for time in sorted(by_time)),
        )
        for pool, by_time in changes.items()
    }


def spot_record_of(described: InstanceTypeDef, history: SpotHistory) -> SpotRecord:
    """Return what EC2 says of an instance, with the prices of its type and zone."""
    return SpotRecord(
        times=history.times,
        prices_usd_per_hour=history.prices_usd_per_hour,
        source=SPOT_SOURCE,
        is_preempted=described.get("StateReason", {}).get("Code") == PREEMPTED_CODE,
        ended_at=end_of(described.get("StateTransitionReason", "")),
    )
