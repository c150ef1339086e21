from __future__ import annotations

import numpy as np
import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.spot.night_state import IDLE, ON_DEMAND
from heterps_core.spot.policies import get_market_policy
from heterps_core.spot.policies.base import Decider, MarketPolicy
from heterps_core.spot.replay import nights_ending_at, replay
from tests.heterps_core.spot.builders import drawn_nights, make_job, make_market, night_of


class ScriptedPolicy(MarketPolicy):
    """Goes where it is told at each tick; to a pool that is down means to wait."""

    name = "scripted"
    keeps_deadlines = False

    def __init__(self, places):
        self.places = places

    def prepare(self, job):
        return ScriptedDecider(job, self.places)


class ScriptedDecider(Decider):
    def __init__(self, job, places):
        super().__init__(job)
        self.places = places

    def decide(self, state):
        tick = self.job.deadline_ticks - state.time_left_ticks
        wish = np.array(self.places)[tick]
        every = np.arange(len(wish))
        return np.where((wish >= 0) & ~state.is_up[every, np.maximum(wish, 0)], IDLE, wish)


def test_a_night_worked_by_hand():
    # Spot: start-up, 3 ticks of work of which 2 are saved, gone. A tick of waiting. On demand: start-up, 2 ticks.
    market = make_market("uuuu......")
    script = ScriptedPolicy([0, 0, 0, 0, IDLE] + [ON_DEMAND] * 5)

    outcome = replay(make_job(work=4, checkpoint_interval=2), night_of(market), script)

    assert outcome.cost_usd == pytest.approx([4 * 0.3 + 3 * 1.0])
    assert (outcome.spot_ticks, outcome.on_demand_ticks) == ([4], [3])
    assert (outcome.num_starts, outcome.num_interruptions) == ([2], [1])
    assert not outcome.is_missed


def test_who_leaves_on_purpose_saves_first():
    script = ScriptedPolicy([0, 0, 0, 0] + [ON_DEMAND] * 6)

    outcome = replay(make_job(work=4, checkpoint_interval=2), night_of(make_market("u" * 10)), script)

    assert outcome.cost_usd == pytest.approx([4 * 0.3 + 2 * 1.0])


def test_a_move_between_pools_is_a_start():
    script = ScriptedPolicy([0, 0, 1, 1, 1, 1, 1, 1, 1, 1])

    outcome = replay(make_job(work=3, startup=1), night_of(make_market("u" * 10, "u" * 10)), script)

    assert (outcome.num_starts, outcome.num_interruptions, outcome.spot_ticks) == ([2], [0], [5])


def one_by_one(job, is_up, prices, on_demand, places):
    """Return cost and whether the deadline was missed of one night, as a plain program."""
    place, startup, done, saved, cost = IDLE, 0, 0, 0, 0.0
    for tick in range(job.deadline_ticks):
        if place >= 0 and not is_up[tick][place]:
            place, done = IDLE, saved
        wish = places[tick]
        if wish >= 0 and not is_up[tick][wish]:
            wish = IDLE
        if done >= job.work_ticks:
            break
        if wish != place:
            place, saved, startup = wish, done, job.startup_ticks
        if place == IDLE:
            continue
        cost += (on_demand if place == ON_DEMAND else prices[tick][place]) / 60
        if startup:
            startup -= 1
        else:
            done += 1
            if done - saved >= job.checkpoint_interval_ticks:
                saved = done
    return cost, done < job.work_ticks


@pytest.mark.parametrize("seed", range(20))
def test_many_nights_are_replayed_as_each_alone_would_be(seed):
    random = np.random.default_rng(seed)
    job = make_job(
        work=int(random.integers(3, 12)),
        deadline=30,
        startup=int(random.integers(1, 4)),
        checkpoint_interval=int(random.integers(1, 5)),
    )
    nights = drawn_nights(seed, num_nights=20, num_ticks=30, num_pools=2, price_varies=True)
    places = np.repeat(random.choice([IDLE, ON_DEMAND, 0, 1], size=10), 3).tolist()

    outcome = replay(job, nights, ScriptedPolicy(places))

    for night in range(20):
        cost, is_missed = one_by_one(
            job, nights.is_up[:, night], nights.spot_usd_per_hour[:, night], 60.0, places
        )
        assert outcome.cost_usd[night] == pytest.approx(cost)
        assert outcome.is_missed[night] == is_missed


def test_on_demand_costs_work_and_one_start():
    outcome = replay(
        make_job(work=4, startup=2), night_of(make_market("." * 10)), get_market_policy("on-demand")
    )

    assert outcome.cost_usd == pytest.approx([6.0])


def test_nights_are_cut_where_they_end():
    market = make_market("u..u.uu")

    nights = nights_ending_at(market, np.array([3, 7]), num_ticks=3)

    assert nights.is_up[:, :, 0].T.tolist() == [[True, False, False], [False, True, True]]


@pytest.mark.parametrize("end", [2, 8])
def test_a_night_outside_the_record_is_refused(end):
    with pytest.raises(ConfigurationError, match="inside the record"):
        nights_ending_at(make_market("u..u.uu"), np.array([end]), num_ticks=3)
