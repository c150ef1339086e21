"""What a spot market was seen to do: how many instances it gave, or at what price, minute by minute.

Every source is brought to one grid of ticks, so that a replay is plain counting. A tick holds what was last
observed when it began; what comes and goes within a tick is not seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from heterps_core.errors import ConfigurationError

TICK_SECONDS = 60
"""Also the least that a started instance is billed for (Amazon EC2, Linux instances: per second, at least 60)."""

Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotTrace:
    """One pool (zone and instance type) over time; exactly one of the two series is there."""

    name: str
    instance_counts: Ints | None = None
    """(ticks,): instances that were to be had, or that ran."""

    price_usd_per_hour: Floats | None = None
    """(ticks,): the spot price."""

    @property
    def num_ticks(self) -> int:
        """Length of the trace."""
        series = self.instance_counts if self.price_usd_per_hour is None else self.price_usd_per_hour
        assert series is not None
        return len(series)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotMarket:
    """Pools that are seen together, from the same moment on, and what their instances cost."""

    name: str
    is_up: Bools
    """(pools, ticks): all the instances that the job needs are to be had."""

    spot_usd_per_hour: Floats
    """(pools, ticks): for one instance."""

    on_demand_usd_per_hour: float
    """For one instance, at any time, always to be had."""

    @property
    def num_pools(self) -> int:
        """How many pools there are."""
        return len(self.is_up)

    @property
    def num_ticks(self) -> int:
        """Length of the record."""
        return int(self.is_up.shape[1])


def market_of(
    traces: list[SpotTrace],
    *,
    name: str,
    num_instances: int,
    on_demand_usd_per_hour: float,
    spot_usd_per_hour: float,
) -> SpotMarket:
    """Return the market in which a job of `num_instances` that run together would have been.

    A pool of counts is up while it has that many, at the given spot price. A pool of prices is up while the
    price is at most the on-demand price, which is the highest that a sensible bid says. Longer traces are cut
    to the shortest.

    Raises:
        ConfigurationError: There is no trace, or a price or count is not positive.
    """
    if not traces:
        raise ConfigurationError("a market needs at least one trace; name a file")
    for what, value in (
        ("number of instances", num_instances),
        ("on-demand price", on_demand_usd_per_hour),
        ("spot price", spot_usd_per_hour),
    ):
        if not 0 < value < np.inf:
            raise ConfigurationError(f"the {what} must be positive, got {value}")
    num_ticks = min(trace.num_ticks for trace in traces)
    is_up = np.zeros((len(traces), num_ticks), dtype=np.bool_)
    price = np.full((len(traces), num_ticks), spot_usd_per_hour)
    for pool, trace in enumerate(traces):
        if trace.price_usd_per_hour is not None:
            price[pool] = trace.price_usd_per_hour[:num_ticks]
            is_up[pool] = price[pool] <= on_demand_usd_per_hour
        elif trace.instance_counts is not None:
            is_up[pool] = trace.instance_counts[:num_ticks] >= num_instances
    return SpotMarket(
        name=name, is_up=is_up, spot_usd_per_hour=price, on_demand_usd_per_hour=on_demand_usd_per_hour
    )


def held(times_s: Floats, values: Floats, *, num_ticks: int) -> Floats:
    """Return the value that was last observed when each tick began; the first one before any observation.

    Args:
        times_s: (observations,), rising or equal; of equal ones the last counts.
        values: (observations,).
        num_ticks: Of the result.
    """
    at = np.searchsorted(times_s, np.arange(num_ticks) * float(TICK_SECONDS), side="right") - 1
    return values[np.maximum(at, 0)]
