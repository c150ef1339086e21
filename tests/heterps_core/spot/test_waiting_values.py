from __future__ import annotations

from functools import cache
from math import ceil, floor

import numpy as np
import pytest

from heterps_core.spot.waiting_values import (
    AGE_BUCKETS_TICKS,
    RUN_ON_DEMAND,
    RUN_ON_SPOT,
    WAIT,
    MarketModel,
    best_actions,
)

UP_HAZARD = (0.05, 0.03, 0.02, 0.01, 0.004)
DOWN_HAZARD = (0.08, 0.03, 0.01, 0.006, 0.002)
STEP, STARTUP, ENTRY, PRICE, REFUGE = 5, 2, 5, 0.3, 0.4
LATE = 1e6


@cache
def values(place, is_up, bucket, work, time, lost_steps):
    """Return the cost of each action, as a recursion over one state at a time.

    Places are "idle", "on-demand", "spot", and ("on-demand" or "spot", steps of start-up left).
    """
    if work == 0:
        return {WAIT: 0.0}
    if time == 0:
        return {WAIT: LATE}
    slack = time - work

    def best(*state):
        return min(values(*state, lost_steps).values())

    def mean(if_up, if_down, if_other=None):
        """Return the mean over the market's step of a cost that depends on (is_up, bucket)."""
        hazard = (UP_HAZARD if is_up else DOWN_HAZARD)[bucket]
        ends = 1 - (1 - hazard) ** STEP
        older = (
            0.0
            if bucket == 4
            else min(STEP / (AGE_BUCKETS_TICKS[bucket + 1] - AGE_BUCKETS_TICKS[bucket]), 1.0)
        )
        same = if_up if is_up else if_down
        stays = (1 - older) * same(bucket) + older * same(min(bucket + 1, 4))
        if not is_up:
            return ends * if_up(0) + (1 - ends) * stays
        gone = (1 - REFUGE) * if_down(0) + REFUGE * (if_other or if_up)(2)
        return ends * gone + (1 - ends) * stays

    def then(place, work):
        return lambda up: lambda bucket: best(place, up, bucket, work, time - 1)

    def idle_with(work):
        low, high = floor(work), ceil(work)
        share = work - low

        def after(up):
            fewer, more = then("idle", low)(up), then("idle", high)(up)
            return lambda bucket: (1 - share) * fewer(bucket) + share * more(bucket)

        return after

    def start_on_demand(left):
        after = then("on-demand" if left == 1 else ("on-demand", left - 1), work)
        return 1 + mean(after(True), after(False))

    def spot(place, spot_work, idle_work):
        idle = idle_with(idle_work)
        return PRICE + mean(then(place, spot_work)(True), idle(False), idle(True))

    if place == ("on-demand", 1):
        return {RUN_ON_DEMAND: start_on_demand(1)}
    if place == ("spot", 1):
        return {RUN_ON_SPOT: spot("spot", work, work)}
    if place == "spot":
        # A step is done, of which `lost_steps` are lost at an interruption; between whole steps, the mean of both.
        return {
            RUN_ON_SPOT: spot("spot", work - 1, work - 1 + lost_steps),
            RUN_ON_DEMAND: start_on_demand(STARTUP),
        }
    waits = then("idle", work)
    costs = {WAIT: mean(waits(True), waits(False)) + (0 if slack > ENTRY else LATE)}
    if place == "idle":
        costs[RUN_ON_DEMAND] = start_on_demand(STARTUP)
    else:
        runs = then("on-demand", work - 1)
        costs[RUN_ON_DEMAND] = 1 + mean(runs(True), runs(False))
    if is_up:
        costs[RUN_ON_SPOT] = spot(("spot", 1), work, work) + (0 if slack >= ENTRY else LATE)
    return costs


@pytest.fixture(scope="module", params=[1.0, 0.4, 1.2])
def lost_steps(request):
    return request.param


@pytest.fixture(scope="module")
def tables(lost_steps):
    model = MarketModel(
        up_hazard=UP_HAZARD,
        down_hazard=DOWN_HAZARD,
        another_up=np.array([0.0, REFUGE]),
        spot_price=np.array([0.9, PRICE]),
    )
    return best_actions(
        model,
        step_ticks=STEP,
        startup_steps=STARTUP,
        entry_slack_steps=ENTRY,
        lost_steps=lost_steps,
        num_times=25,
        num_works=37,
    )


@pytest.mark.parametrize(
    ("table", "place", "is_up"),
    [
        ("idle_up", "idle", True),
        ("idle_down", "idle", False),
        ("on_demand_up", "on-demand", True),
        ("on_demand_down", "on-demand", False),
    ],
)
def test_every_action_is_one_of_least_cost(tables, lost_steps, table, place, is_up):
    found = getattr(tables, table)
    checked = set()
    for time in range(1, 25):
        for work in range(1, min(time, 12) + 1):
            for bucket in range(5):
                costs = values(place, is_up, bucket, work, time, lost_steps)
                action = int(found[time, 1, bucket, work])
                if min(costs.values()) < LATE / 10:
                    assert costs[action] == pytest.approx(min(costs.values()), rel=1e-9)
                    checked.add(action)

    assert len(checked) >= 2
