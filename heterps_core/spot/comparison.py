"""Market policies side by side on the same recorded nights, against what hindsight would have paid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heterps_core.errors import ConfigurationError
from heterps_core.spot.clairvoyant import clairvoyant_cost_usd
from heterps_core.spot.job import NightlyJob
from heterps_core.spot.policies import get_market_policy
from heterps_core.spot.replay import Nights, joined, nights_ending_at, replay
from heterps_core.spot.trace import TICK_SECONDS, Bools, Floats, Ints, SpotMarket
from heterps_core.units import SECONDS_PER_HOUR

TICKS_PER_DAY = 24 * 60
BOOTSTRAP_SAMPLES = 1_000

NIGHTS_AT_ONCE = 128
"""Of the clairvoyant's tables; larger ones leave the processor's cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyNights:
    """What each of N nights cost under a policy, over what it costs on demand throughout."""

    cost_shares: Floats
    is_missed: Bools
    num_interruptions: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The same N nights under several policies."""

    bound_shares: Floats
    """(N,): the clairvoyant bound, over the cost on demand."""

    days: Ints
    """(N,): in which day of the record a night ended; nights of one day are not independent of one another."""

    policies: dict[str, PolicyNights]

    def cost_over_bound(self, policy: str) -> float:
        """Return the sum of a policy's costs over the sum of the bounds."""
        return float(self.policies[policy].cost_shares.sum() / self.bound_shares.sum())

    def cost_over_on_demand(self, policy: str) -> float:
        """Return the mean of a policy's costs, each over that of its night on demand."""
        return float(self.policies[policy].cost_shares.mean())

    def share_missed(self, policy: str) -> float:
        """Return the share of nights whose work was not done at the deadline."""
        return float(self.policies[policy].is_missed.mean())

    def best_peer(self, policy: str) -> str | None:
        """Return the cheapest other policy of those that keep deadlines by rule; None where there is none."""
        others = [
            name for name in self.policies if name != policy and get_market_policy(name).keeps_deadlines
        ]
        return min(others, key=self.cost_over_bound, default=None)

    def excess_over(self, policy: str, peer: str, *, seed: int) -> tuple[float, float, float]:
        """Return cost of a policy over that of a peer, less 1: over all nights, and a 95 % interval.

        The interval is from a bootstrap that draws whole days, all nights of a day together.
        """
        _, day = np.unique(self.days, return_inverse=True)
        ours, theirs = (np.bincount(day, weights=self.policies[name].cost_shares) for name in (policy, peer))
        drawn = np.random.default_rng(seed).integers(len(ours), size=(BOOTSTRAP_SAMPLES, len(ours)))
        samples = ours[drawn].sum(axis=1) / theirs[drawn].sum(axis=1) - 1
        low, high = np.quantile(samples, [0.025, 0.975])
        return float(ours.sum() / theirs.sum() - 1), float(low), float(high)


def compare_policies(
    markets: Sequence[SpotMarket],
    jobs: Sequence[NightlyJob],
    policies: Sequence[str],
    *,
    ticks_between_nights: int,
) -> Comparison:
    """Replay every job on nights that end every so many ticks, in every market that is long enough.

    Args:
        markets: All with the same number of pools.
        jobs: Each is replayed on all nights.
        policies: Names of `MARKET_POLICIES`.
        ticks_between_nights: From the end of a night to that of the next one; they may overlap.

    Raises:
        ConfigurationError: No market is as long as any job.
        UnknownNameError: A policy is not known.
    """
    members = {name: get_market_policy(name) for name in policies}
    bounds: list[Floats] = []
    days: list[Ints] = []
    results: dict[str, list[PolicyNights]] = {name: [] for name in policies}
    for job in jobs:
        pieces = []
        for market in markets:
            ends = np.arange(market.num_ticks, job.deadline_ticks - 1, -ticks_between_nights)
            if len(ends):
                pieces.append(nights_ending_at(market, ends, num_ticks=job.deadline_ticks))
                days.append(ends // TICKS_PER_DAY)
        if not pieces:
            continue
        nights = joined(pieces)
        on_demand_usd = nights.on_demand_usd_per_hour * (
            (job.work_ticks + job.startup_ticks) * TICK_SECONDS / SECONDS_PER_HOUR
        )
        bounds.append(_bounds_usd(job, nights) / on_demand_usd)
        for name, policy in members.items():
            outcomes = replay(job, nights, policy)
            results[name].append(
                PolicyNights(
                    cost_shares=outcomes.cost_usd / on_demand_usd,
                    is_missed=outcomes.is_missed,
                    num_interruptions=outcomes.num_interruptions,
                )
            )
    if not bounds:
        shortest = min(job.deadline_ticks for job in jobs)
        longest = max(market.num_ticks for market in markets)
        raise ConfigurationError(
            f"no trace holds a whole night: the shortest deadline is {shortest} minutes, the longest trace has "
            f"{longest}; give a longer trace or a smaller job"
        )
    return Comparison(
        bound_shares=np.concatenate(bounds),
        days=np.concatenate(days),
        policies={
            name: PolicyNights(
                cost_shares=np.concatenate([part.cost_shares for part in parts]),
                is_missed=np.concatenate([part.is_missed for part in parts]),
                num_interruptions=np.concatenate([part.num_interruptions for part in parts]),
            )
            for name, parts in results.items()
        },
    )


def _bounds_usd(job: NightlyJob, nights: Nights) -> Floats:
    starts = range(0, len(nights), NIGHTS_AT_ONCE)
    return np.concatenate(
        [clairvoyant_cost_usd(job, nights.part(first, first + NIGHTS_AT_ONCE)) for first in starts]
    )
