"""On-demand from the first minute: never late, never cheap."""

from __future__ import annotations

import numpy as np

from heterps_core.spot.job import NightlyJob
from heterps_core.spot.night_state import ON_DEMAND, NightState
from heterps_core.spot.policies.base import Decider, MarketPolicy
from heterps_core.spot.trace import Ints


class OnDemandPolicy(MarketPolicy):
    """Buys no spot instance."""

    name = "on-demand"

    def prepare(self, job: NightlyJob) -> Decider:
        """Return the decider; see `MarketPolicy.prepare`."""
        return _OnDemandDecider(job)


class _OnDemandDecider(Decider):
    def decide(self, state: NightState) -> Ints:
        return np.full_like(state.place, ON_DEMAND)
