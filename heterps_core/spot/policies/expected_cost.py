"""The least expected cost on a market whose spells last the longer the older they are: when to wait, when to pay.

Slack is what buys spot: waiting spends it, and so does every start. How to spend it best is a small decision
process (`waiting_values`), solved once for a job; in the night every decision is a look into its tables.
"""

from __future__ import annotations

import numpy as np

from heterps_core.spot.job import NightlyJob
from heterps_core.spot.night_state import IDLE, ON_DEMAND, NightState
from heterps_core.spot.policies.base import Decider, MarketPolicy
from heterps_core.spot.safety_net import granted
from heterps_core.spot.trace import Floats, Ints
from heterps_core.spot.waiting_values import (
    RUN_ON_DEMAND,
    RUN_ON_SPOT,
    MarketModel,
    best_actions,
    bucket_of,
)

UP_HAZARD = (0.0336, 0.0195, 0.0112, 0.0049, 0.0021)
DOWN_HAZARD = (0.0472, 0.0192, 0.0128, 0.0050, 0.0013)
"""Chance per minute that a spell ends, by bucket of age: ends over minutes in the eight traces that SkyPilot took
on AWS from 2022-10-26 (1,525 spells each way). Other years and sources are alike; docs/SPOT_REPLAY.md compares."""

PRICE_SHARES = (0.1, 0.2, 0.3, 0.45, 0.65, 0.9)
"""Spot over on-demand prices for which tables are made; a market uses the nearest in ratio."""

REFUGE = 0.8
"""Chance that a second pool which is up now still is when the first one goes down."""

LEAST_STEP_TICKS = 3
"""Steps of the decision process are at least this long; those of 2 gain less than 0.1 % over those of 3."""

MOST_STEPS = 400
"""Up to the deadline; longer jobs get longer steps, so that the tables stay small. A start is never under a step."""


class ExpectedCostPolicy(MarketPolicy):
    """Follows the least expected cost; keeps a spot instance as long as it lives.

    Among pools that are up it takes the one of least price and risk: price plus hazard times what a restart costs.
    """

    name = "expected-cost"

    def prepare(self, job: NightlyJob) -> Decider:
        """Return the decider; see `MarketPolicy.prepare`."""
        return _ExpectedCostDecider(job)


class _ExpectedCostDecider(Decider):
    def __init__(self, job: NightlyJob) -> None:
        super().__init__(job)
        least_step_ticks = max(LEAST_STEP_TICKS, -(-job.deadline_ticks // MOST_STEPS))
        startup_steps = max(1, job.startup_ticks // least_step_ticks)
        self._step_ticks = max(-(-job.startup_ticks // startup_steps), least_step_ticks)
        self._entry_slack_steps = -(-job.entry_slack_ticks // self._step_ticks)
        most_work = -(-job.work_ticks // self._step_ticks)
        most_slack = int(self._slack_steps(np.array(job.deadline_ticks - job.work_ticks)))
        prices, refuges = np.meshgrid(PRICE_SHARES, (0.0, REFUGE), indexing="ij")
        self._actions = best_actions(
            MarketModel(
                up_hazard=UP_HAZARD,
                down_hazard=DOWN_HAZARD,
                another_up=refuges.ravel(),
                spot_price=prices.ravel(),
            ),
            step_ticks=self._step_ticks,
            startup_steps=startup_steps,
            entry_slack_steps=self._entry_slack_steps,
            lost_steps=job.checkpoint_interval_ticks / 2 / self._step_ticks,
            num_times=most_work + most_slack + 1,
            num_works=most_work + 1,
        )

    def decide(self, state: NightState) -> Ints:
        is_any_up = state.is_up.any(axis=1)
        pool = self._least_risk_pool(state)
        every = np.arange(len(pool))
        age = np.where(is_any_up, state.age_ticks[every, pool], state.age_ticks.min(axis=1))
        share = state.spot_usd_per_hour[every, pool] / state.on_demand_usd_per_hour
        work = -(-state.work_left_ticks // self._step_ticks)
        # The tables are by time left; what an earlier night cannot have is taken for its longest.
        time = np.minimum(work + self._slack_steps(state.slack_ticks), len(self._actions.idle_up) - 1)
        at = (time, _market_of(share, state.is_up.sum(axis=1)), bucket_of(age), work)
        tables = self._actions
        is_on_demand = state.place == ON_DEMAND
        action = np.where(
            is_any_up,
            np.where(is_on_demand, tables.on_demand_up[at], tables.idle_up[at]),
            np.where(is_on_demand, tables.on_demand_down[at], tables.idle_down[at]),
        )
        wish = np.where(action == RUN_ON_SPOT, pool, np.where(action == RUN_ON_DEMAND, ON_DEMAND, IDLE))
        return granted(self.job, state, np.where(state.place >= 0, state.place, wish))

    def _slack_steps(self, slack_ticks: Ints) -> Ints:
        """Return slack in whole steps, exact where a spot instance may just be started."""
        beyond = (slack_ticks - self.job.entry_slack_ticks) // self._step_ticks
        return np.asarray(np.maximum(beyond + self._entry_slack_steps, 0))

    def _least_risk_pool(self, state: NightState) -> Ints:
        restart_ticks = self.job.startup_ticks + self.job.checkpoint_interval_ticks / 2
        risk = np.array(UP_HAZARD)[bucket_of(state.age_ticks)] * restart_ticks
        rate = state.spot_usd_per_hour + risk * state.on_demand_usd_per_hour[:, None]
        # Ties between pools of one bucket go to the older one.
        order = (
            np.where(state.is_up, rate, np.inf)
            - 1e-9 * state.age_ticks * state.on_demand_usd_per_hour[:, None]
        )
        return np.asarray(np.argmin(order, axis=1))


def _market_of(price_share: Floats, num_up: Ints) -> Ints:
    """Return the index of the nearest market of the tables."""
    borders = np.sqrt(np.array(PRICE_SHARES[:-1]) * np.array(PRICE_SHARES[1:]))
    return 2 * np.searchsorted(borders, price_share) + (num_up > 1)
