"""Small markets for tests: written out by hand, or drawn from a seeded chain."""

from __future__ import annotations

import numpy as np

from heterps_core.spot.job import NightlyJob
from heterps_core.spot.replay import Nights, nights_ending_at
from heterps_core.spot.trace import SpotMarket


def make_job(
    *, work: int = 4, deadline: int = 10, startup: int = 1, checkpoint_interval: int = 1
) -> NightlyJob:
    return NightlyJob(
        work_ticks=work,
        deadline_ticks=deadline,
        startup_ticks=startup,
        checkpoint_interval_ticks=checkpoint_interval,
    )


def make_market(*pools: str, spot_usd: float = 18.0, on_demand_usd: float = 60.0) -> SpotMarket:
    """Return pools written as one character a tick: `u` for up, `.` for down. The prices are 0.3 and 1 USD a tick."""
    is_up = np.array([[letter == "u" for letter in pool] for pool in pools])
    return SpotMarket(
        name="by hand",
        is_up=is_up,
        spot_usd_per_hour=np.full(is_up.shape, spot_usd),
        on_demand_usd_per_hour=on_demand_usd,
    )


def night_of(market: SpotMarket) -> Nights:
    """Return the whole market as one night."""
    return nights_ending_at(market, np.array([market.num_ticks]), num_ticks=market.num_ticks)


def drawn_nights(
    seed: int,
    *,
    num_nights: int,
    num_ticks: int,
    num_pools: int,
    stay: float = 0.9,
    price_varies: bool = False,
) -> Nights:
    """Return nights whose pools keep their state with chance `stay` from tick to tick."""
    random = np.random.default_rng(seed)
    shape = (num_ticks, num_nights, num_pools)
    flips = random.random(shape) > stay
    flips[0] = random.random(shape[1:]) < 0.5
    prices = random.uniform(3.0, 60.0, shape) if price_varies else np.full(shape, 18.0)
    return Nights(
        is_up=np.cumsum(flips, axis=0) % 2 == 1,
        spot_usd_per_hour=prices,
        on_demand_usd_per_hour=np.full(num_nights, 60.0),
    )
