from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from heterps_core.spot.clairvoyant import clairvoyant_cost_usd
from heterps_core.spot.night_state import IDLE, ON_DEMAND
from heterps_core.spot.replay import replay
from tests.heterps_core.spot.builders import drawn_nights, make_job, make_market, night_of
from tests.heterps_core.spot.test_replay import ScriptedPolicy


def least_by_trial(job, nights):
    """Return the least cost of each night over every sequence of places."""
    num_pools = nights.is_up.shape[2]
    best = np.full(len(nights), np.inf)
    for places in product([IDLE, ON_DEMAND, *range(num_pools)], repeat=job.deadline_ticks):
        outcome = replay(job, nights, ScriptedPolicy(list(places)))
        best = np.minimum(best, np.where(outcome.is_missed, np.inf, outcome.cost_usd))
    return best


@pytest.mark.parametrize(("seed", "num_pools", "deadline"), [(0, 1, 7), (1, 1, 7), (2, 2, 5)])
def test_the_bound_is_the_optimum_where_every_tick_is_saved(seed, num_pools, deadline):
    nights = drawn_nights(
        seed, num_nights=40, num_ticks=deadline, num_pools=num_pools, stay=0.6, price_varies=True
    )
    for job in (make_job(work=3, deadline=deadline), make_job(work=2, deadline=deadline, startup=2)):
        assert clairvoyant_cost_usd(job, nights) == pytest.approx(least_by_trial(job, nights))


def test_nothing_undercuts_the_bound_where_work_can_be_lost():
    nights = drawn_nights(3, num_nights=40, num_ticks=7, num_pools=1, stay=0.6)
    job = make_job(work=3, deadline=7, checkpoint_interval=3)

    best = least_by_trial(job, nights)

    assert np.all(clairvoyant_cost_usd(job, nights) <= best + 1e-9)


def test_an_optimum_by_hand():
    # Three ticks of spot and its start at 0.3, then on demand: its start and one tick. Or 1 + 4 on demand alone.
    assert clairvoyant_cost_usd(make_job(), night_of(make_market("..uuuu...."))) == pytest.approx([1.2 + 2.0])
