"""Run a market policy over recorded nights, tick by tick, and count money, time and interruptions.

At each tick the market takes what went down, the policy chooses, and then the tick passes: it is paid for
wherever instances are held, start-up or not, and brings a tick of progress once they are up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from heterps_core.errors import ConfigurationError
from heterps_core.spot.job import NightlyJob
from heterps_core.spot.night_state import AGE_AT_FIRST_SIGHT_TICKS, IDLE, ON_DEMAND, NightState, aged
from heterps_core.spot.policies.base import MarketPolicy
from heterps_core.spot.trace import TICK_SECONDS, Bools, Floats, Ints, SpotMarket
from heterps_core.units import SECONDS_PER_HOUR


@dataclass(frozen=True, kw_only=True, slots=True)
class Nights:
    """N nights of one length T, cut out of markets of P pools."""

    is_up: Bools
    """(T, N, P)."""

    spot_usd_per_hour: Floats
    """(T, N, P)."""

    on_demand_usd_per_hour: Floats
    """(N,)."""

    def __len__(self) -> int:
        return len(self.on_demand_usd_per_hour)

    def part(self, first: int, end: int) -> Nights:
        """Return the nights from `first` up to `end`."""
        return Nights(
            is_up=self.is_up[:, first:end],
            spot_usd_per_hour=self.spot_usd_per_hour[:, first:end],
            on_demand_usd_per_hour=self.on_demand_usd_per_hour[first:end],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NightOutcomes:
    """What became of N nights; for one instance of the job."""

    cost_usd: Floats
    is_missed: Bools
    """The work was not done at the deadline; the cost is what had been paid by then."""

    num_interruptions: Ints
    num_starts: Ints
    on_demand_ticks: Ints
    spot_ticks: Ints


def nights_ending_at(market: SpotMarket, ends: Ints, *, num_ticks: int) -> Nights:
    """Cut the nights that end at these ticks out of a market.

    Args:
        market: The whole record.
        ends: (N,): the first tick after each night, `num_ticks` to the market's length.
        num_ticks: Length of the nights.

    Raises:
        ConfigurationError: A night would begin before the record or end after it.
    """
    if len(ends) == 0 or ends.min() < num_ticks or ends.max() > market.num_ticks:
        raise ConfigurationError(
            f"nights of {num_ticks} minutes must lie inside the record of {market.name}, {market.num_ticks} "
            "minutes long; give a longer trace or a smaller job"
        )
    starts = ends - num_ticks

    return Nights(
        is_up=_cut(market.is_up, starts, num_ticks),
        spot_usd_per_hour=_cut(market.spot_usd_per_hour, starts, num_ticks),
        on_demand_usd_per_hour=np.full(len(ends), market.on_demand_usd_per_hour),
    )


def joined(pieces: Sequence[Nights]) -> Nights:
    """Return the nights of all pieces, which have one length and as many pools, one after the other."""
    return Nights(
        is_up=np.concatenate([piece.is_up for piece in pieces], axis=1),
        spot_usd_per_hour=np.concatenate([piece.spot_usd_per_hour for piece in pieces], axis=1),
        on_demand_usd_per_hour=np.concatenate([piece.on_demand_usd_per_hour for piece in pieces]),
    )


def _cut(series: NDArray[Any], starts: Ints, num_ticks: int) -> NDArray[Any]:
    windows = sliding_window_view(series, num_ticks, axis=1)
    return np.ascontiguousarray(windows[:, starts].transpose(2, 1, 0))


def replay(job: NightlyJob, nights: Nights, policy: MarketPolicy) -> NightOutcomes:
    """Let a policy buy for every night; a night has as many ticks as the job has until its deadline."""
    num_nights = len(nights)
    decider = policy.prepare(job)
    every = np.arange(num_nights)
    usd_per_tick = TICK_SECONDS / SECONDS_PER_HOUR
    place = np.full(num_nights, IDLE)
    startup_left, done, saved = (np.zeros(num_nights, dtype=np.int64) for _ in range(3))
    interruptions, starts, on_demand_ticks, spot_ticks = (
        np.zeros(num_nights, dtype=np.int64) for _ in range(4)
    )
    cost = np.zeros(num_nights)
    age = np.full(nights.is_up.shape[1:], AGE_AT_FIRST_SIGHT_TICKS)
    for tick in range(job.deadline_ticks):
        is_up, prices = nights.is_up[tick], nights.spot_usd_per_hour[tick]
        if tick > 0:
            age = aged(age, nights.is_up[tick - 1], is_up)
        is_taken = (place >= 0) & ~is_up[every, np.maximum(place, 0)]
        done[is_taken] = saved[is_taken]
        place[is_taken] = IDLE
        interruptions += is_taken
        state = NightState(
            time_left_ticks=np.full(num_nights, job.deadline_ticks - tick),
            work_left_ticks=job.work_ticks - done,
            unsaved_ticks=done - saved,
            place=place,
            is_up=is_up,
            age_ticks=age,
            spot_usd_per_hour=prices,
            on_demand_usd_per_hour=nights.on_demand_usd_per_hour,
        )
        chosen = np.where(done < job.work_ticks, decider.decide(state), IDLE)
        is_new = chosen != place
        saved = np.where(is_new, done, saved)
        is_start = is_new & (chosen != IDLE)
        starts += is_start
        startup_left = np.where(is_start, job.startup_ticks, startup_left)
        place = chosen
        is_held = place != IDLE
        done += is_held & (startup_left == 0)
        startup_left = np.maximum(startup_left - 1, 0)
        saved = np.where(done - saved >= job.checkpoint_interval_ticks, done, saved)
        price = np.where(
            place == ON_DEMAND, nights.on_demand_usd_per_hour, prices[every, np.maximum(place, 0)]
        )
        cost += np.where(is_held, price * usd_per_tick, 0.0)
        on_demand_ticks += place == ON_DEMAND
        spot_ticks += place >= 0
    return NightOutcomes(
        cost_usd=cost,
        is_missed=done < job.work_ticks,
        num_interruptions=interruptions,
        num_starts=starts,
        on_demand_ticks=on_demand_ticks,
        spot_ticks=spot_ticks,
    )
