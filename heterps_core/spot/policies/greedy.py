"""Spot whenever it is to be had, waiting for it until the deadline forces on-demand."""

from __future__ import annotations

import numpy as np

from heterps_core.spot.job import NightlyJob
from heterps_core.spot.night_state import ON_DEMAND, NightState, cheapest_pool
from heterps_core.spot.policies.base import Decider, MarketPolicy
from heterps_core.spot.safety_net import granted
from heterps_core.spot.trace import Ints


class GreedyPolicy(MarketPolicy):
    """The greedy policy of Can't Be Late (NSDI 2024, section 4): Thrifty, Exploitation and Safety-net rules.

    Spends all its slack on the first gaps of spot, and from then on runs on demand to the end.
    """

    name = "greedy"

    def prepare(self, job: NightlyJob) -> Decider:
        """Return the decider; see `MarketPolicy.prepare`."""
        return _GreedyDecider(job)


class _GreedyDecider(Decider):
    def decide(self, state: NightState) -> Ints:
        stays = (state.place >= 0) | (state.place == ON_DEMAND)
        return granted(self.job, state, np.where(stays, state.place, cheapest_pool(state)))
