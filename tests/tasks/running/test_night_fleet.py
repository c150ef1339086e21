"""A fleet that lacks machines looks for them while it trains: three of four machines, each trains a sample a second.

By hand as in `test_fleet_decision.py`: in 4,000 s three machines would be late, four would not.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from heterps_core.errors import ProvisioningError
from heterps_core.training.storage.run_directory import STOP
from infra.providers.base import InsufficientCapacityError
from infra.workspace import Workspace
from tasks.running import night_fleet
from tasks.running.night_fleet import GOES_ON, NightFleet, Replan
from tests.tasks.builders import bought, fleet_of, fleet_run, make_spot_problem, without_spot

WHOLE = fleet_of(bought(4))


class Hurry:
    """A deadline so many seconds ahead."""

    def __init__(self, seconds):
        self.seconds = seconds

    def seconds_left(self, now):
        return self.seconds


@pytest.fixture
def market(monkeypatch):
    """Return the numbers of machines that were asked for; a test sets how many are available."""

    class Market:
        available, asked = 4, []

    market = Market()
    market.asked = []

    @contextmanager
    def replaced(run, wanted, missing):
        market.asked.append(len(missing))
        if len(missing) > market.available:
            raise InsufficientCapacityError("none is available")
        yield wanted

    monkeypatch.setattr(night_fleet, "replaced", replaced)
    return market


@pytest.fixture
def fleet(tmp_path, market):
    """Return what makes a fleet with so many seconds left, and some machines of four missing."""

    def make(*, seconds_left=4_000.0, missing=("stage0-node3",), interval_s=0.0):
        problem = without_spot(make_spot_problem(hours=4))
        run = fleet_run(Workspace(root=tmp_path).create(), deadline=Hurry(seconds_left))
        found = NightFleet(replace(run, problem=problem), WHOLE, ExitStack(), interval_s=interval_s)
        found.present = WHOLE.without(missing) if missing else WHOLE
        return found

    return make


def test_machines_that_are_up_ask_the_training_to_stop_at_a_step(fleet):
    found = fleet()
    found.look()

    assert found.following == WHOLE
    assert found.run.directory.stop_reason() == GOES_ON


def test_a_fleet_that_is_in_time_and_cheapest_as_it_is_is_left_alone(fleet):
    found = fleet(seconds_left=8_000.0)
    found.look()

    assert (found.following, found.run.directory.exists(STOP)) == (None, False)


def test_a_whole_fleet_has_nothing_to_look_for(fleet, market):
    found = fleet(missing=())
    found.look()

    assert (found.following, market.asked) == (None, [])


def test_where_all_are_not_available_as_many_are_taken_as_halving_finds(fleet, market):
    market.available = 1
    found = fleet(missing=("stage0-node1", "stage0-node2", "stage0-node3"), seconds_left=7_500.0)
    found.look()

    assert market.asked == [3, 1]
    assert len(found.following.cluster.nodes) == 2


def test_where_none_is_available_and_the_fleet_is_late_the_rest_is_planned_again_without_them(fleet, market):
    market.available = 0
    found = fleet()
    found.run = replace(found.run, problem=make_spot_problem(hours=4, spot_price_share=1.0))
    found.look()

    assert found.following == Replan(frozenset({"cpu-c7i"}))
    assert found.run.directory.stop_reason() == GOES_ON


def test_between_two_looks_nothing_is_asked_and_capacity_that_returns_is_taken_at_a_later_one(fleet, market):
    market.available = 0
    waiting, looking = fleet(interval_s=1e9), fleet()
    for _ in range(3):
        waiting.look()
    assert market.asked == [1]

    looking.look()
    assert looking.following is None
    market.available = 1
    looking.look()
    assert looking.following == WHOLE


def test_machines_that_were_replaced_meanwhile_stay_where_others_come_back(fleet):
    found = fleet()
    other = replace(found.present.cluster.nodes[0], price_usd_per_hour=0.7)
    nodes = (other, *found.present.cluster.nodes[1:])
    found.present = replace(found.present, cluster=replace(found.present.cluster, nodes=nodes))
    found.look()

    assert found.following.cluster.nodes == (other, *WHOLE.cluster.nodes[1:])


def test_a_run_that_is_asked_to_stop_keeps_that_mark_though_it_grew(fleet):
    found = fleet()
    found.run.directory.request_stop()
    found.look()

    assert found.following == WHOLE
    assert found.run.directory.stop_reason() == ""


def test_why_none_could_be_launched_is_the_answer_of_the_largest_try(fleet, market, monkeypatch):
    market.available = 0
    found = fleet(missing=("stage0-node2", "stage0-node3"))

    with pytest.raises(ProvisioningError, match="none is available"):
        found._launch(WHOLE, ["stage0-node2", "stage0-node3"])

    assert market.asked == [2, 1]
