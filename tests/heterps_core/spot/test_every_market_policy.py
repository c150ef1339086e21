"""What holds for every market policy in the registry."""

from __future__ import annotations

import numpy as np
import pytest

from heterps_core.errors import ConfigurationError, UnknownNameError
from heterps_core.spot.clairvoyant import clairvoyant_cost_usd
from heterps_core.spot.job import nightly_job
from heterps_core.spot.policies import MARKET_POLICIES, get_market_policy
from heterps_core.spot.replay import replay
from tests.heterps_core.spot.builders import drawn_nights, make_job

KEEPING = [name for name in MARKET_POLICIES if get_market_policy(name).keeps_deadlines]

JOBS = [
    make_job(work=40, deadline=41, startup=1, checkpoint_interval=1),
    make_job(work=40, deadline=50, startup=3, checkpoint_interval=4),
    make_job(work=40, deadline=60, startup=6, checkpoint_interval=10),
    make_job(work=60, deadline=120, startup=6, checkpoint_interval=10),
    make_job(work=60, deadline=180, startup=1, checkpoint_interval=30),
    make_job(work=5, deadline=100, startup=20, checkpoint_interval=2),
]


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("stay", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("num_pools", [1, 3])
def test_no_deadline_is_missed_and_no_bound_undercut_whatever_the_market_does(name, stay, num_pools):
    for seed, job in enumerate(JOBS):
        nights = drawn_nights(
            seed,
            num_nights=100,
            num_ticks=job.deadline_ticks,
            num_pools=num_pools,
            stay=stay,
            price_varies=seed % 2 == 1,
        )

        outcome = replay(job, nights, get_market_policy(name))

        assert not outcome.is_missed.any()
        assert np.all(outcome.cost_usd >= clairvoyant_cost_usd(job, nights) - 1e-9)


@pytest.mark.parametrize("name", MARKET_POLICIES)
def test_a_night_is_bought_alone_as_among_others(name):
    job = JOBS[3]
    nights = drawn_nights(7, num_nights=30, num_ticks=job.deadline_ticks, num_pools=2)

    together = replay(job, nights, get_market_policy(name)).cost_usd
    alone = [
        replay(job, nights.part(night, night + 1), get_market_policy(name)).cost_usd for night in range(30)
    ]

    assert together.tolist() == np.concatenate(alone).tolist()


@pytest.mark.parametrize("name", MARKET_POLICIES)
def test_a_policy_has_the_name_under_which_it_is_listed(name):
    assert get_market_policy(name).name == name


@pytest.mark.parametrize("name", [name for name in KEEPING if name != "on-demand"])
def test_spot_that_is_always_there_is_used_from_the_first_minute(name):
    job = JOBS[3]
    nights = drawn_nights(0, num_nights=4, num_ticks=job.deadline_ticks, num_pools=1)
    nights.is_up[:] = True

    assert replay(job, nights, get_market_policy(name)).cost_usd == pytest.approx([66 * 0.3] * 4)


def test_an_unknown_policy_is_answered_with_the_known_ones():
    with pytest.raises(UnknownNameError, match="uniform-progress"):
        get_market_policy("uniform")


def test_a_deadline_that_on_demand_cannot_meet_is_refused():
    with pytest.raises(ConfigurationError, match="allow more time"):
        nightly_job(work_hours=2, slack=1.01, startup_seconds=360, checkpoint_interval_seconds=600)
