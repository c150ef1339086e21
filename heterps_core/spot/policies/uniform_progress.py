"""Uniform Progress: never behind the straight line from nothing to done at the deadline."""

from __future__ import annotations

import numpy as np

from heterps_core.spot.job import NightlyJob
from heterps_core.spot.night_state import IDLE, ON_DEMAND, NightState, cheapest_pool
from heterps_core.spot.policies.base import Decider, MarketPolicy
from heterps_core.spot.safety_net import granted
from heterps_core.spot.trace import Ints


class UniformProgressPolicy(MarketPolicy):
    """The policy of Can't Be Late (Wu and others, NSDI 2024).

    With work C and deadline D the expected progress at time t is t C / D. Behind it and without spot the job
    runs on demand. A spot instance is kept as long as it lives. On-demand is left, for spot or to wait, only
    with the progress that is expected 2 d later (hysteresis).
    """

    name = "uniform-progress"

    def prepare(self, job: NightlyJob) -> Decider:
        """Return the decider; see `MarketPolicy.prepare`."""
        return _UniformProgressDecider(job)


class _UniformProgressDecider(Decider):
    def decide(self, state: NightState) -> Ints:
        job = self.job
        time = job.deadline_ticks - state.time_left_ticks
        progress = job.work_ticks - state.work_left_ticks
        line = job.work_ticks / job.deadline_ticks
        spot = cheapest_pool(state)
        is_behind = progress < time * line
        may_leave = progress >= (time + 2 * job.startup_ticks) * line
        from_idle = np.where((spot == IDLE) & is_behind, ON_DEMAND, spot)
        from_on_demand = np.where(may_leave, spot, ON_DEMAND)
        wish = np.where(state.place == ON_DEMAND, from_on_demand, from_idle)
        return granted(job, state, np.where(state.place >= 0, state.place, wish))
