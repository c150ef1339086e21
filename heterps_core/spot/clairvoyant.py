"""What a night would have cost at least, with the whole market known in advance.

Dynamic programming over ticks and work left. Interruptions lose nothing here, since who knows of one saves
before it; with that the result is a bound that no policy undercuts, and the optimum where every tick is saved.
"""

from __future__ import annotations

import numpy as np

from heterps_core.spot.job import NightlyJob
from heterps_core.spot.replay import Nights
from heterps_core.spot.trace import TICK_SECONDS, Floats
from heterps_core.units import SECONDS_PER_HOUR


def clairvoyant_cost_usd(job: NightlyJob, nights: Nights) -> Floats:
    """Return (N,) lower bounds on the cost of each night for one instance of the job.

    With w ticks of work left at tick t, I, O and S_p are the least costs from idle, from on-demand and from pool p
    whose instances are up: O(t, w) = min(I(t, w), price + O(t + 1, w - 1)), the same for S_p while p is up, and
    I(t, w) the least of I(t + 1, w) and of d ticks of start-up followed by O or S_p at t + d, the latter only
    where p stays up until then.
    """
    num_nights, num_pools = nights.is_up.shape[1:]
    num_work, startup = job.work_ticks, job.startup_ticks
    usd_per_tick = TICK_SECONDS / SECONDS_PER_HOUR
    on_demand_tick = nights.on_demand_usd_per_hour[:, None] * usd_per_tick
    end = job.deadline_ticks
    spot_tick = np.where(nights.is_up, nights.spot_usd_per_hour * usd_per_tick, np.inf)
    unreachable = np.full((num_nights, num_work + 1), np.inf)
    unreachable[:, 0] = 0.0
    idle = unreachable
    # Values at t + 1 ... t + d, the nearest first: a start reaches d ticks ahead.
    on_demand = [unreachable] * startup
    spot = [[unreachable] * startup for _ in range(num_pools)]
    for tick in range(end - 1, -1, -1):
        waited = idle
        idle = waited.copy()
        if tick + startup < end:
            np.minimum(idle, on_demand[-1] + startup * on_demand_tick, out=idle)
            for pool in range(num_pools):
                start_cost = spot_tick[tick : tick + startup, :, pool].sum(axis=0)
                np.minimum(idle, spot[pool][-1] + start_cost[:, None], out=idle)
        idle[:, 0] = 0.0
        on_demand = [_run(idle, on_demand[0], on_demand_tick), *on_demand[:-1]]
        for pool in range(num_pools):
            price = spot_tick[tick, :, pool, None]
            spot[pool] = [_run(idle, spot[pool][0], price), *spot[pool][:-1]]
    return idle[:, num_work]


def _run(idle: Floats, after: Floats, price: Floats) -> Floats:
    """Return the least cost at a tick on instances that are up, given those a tick later."""
    result = idle.copy()
    np.minimum(idle[:, 1:], after[:, :-1] + price, out=result[:, 1:])
    return result
