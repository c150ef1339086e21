"""Spot whenever it is to be had and nothing else: the bill of a run without a deadline."""

from __future__ import annotations

import numpy as np

from heterps_core.spot.job import NightlyJob
from heterps_core.spot.night_state import NightState, cheapest_pool
from heterps_core.spot.policies.base import Decider, MarketPolicy
from heterps_core.spot.trace import Ints


class SpotOnlyPolicy(MarketPolicy):
    """Waits for spot however long it takes, and so misses deadlines."""

    name = "spot-only"
    keeps_deadlines = False

    def prepare(self, job: NightlyJob) -> Decider:
        """Return the decider; see `MarketPolicy.prepare`."""
        return _SpotOnlyDecider(job)


class _SpotOnlyDecider(Decider):
    def decide(self, state: NightState) -> Ints:
        return np.where(state.place >= 0, state.place, cheapest_pool(state))
