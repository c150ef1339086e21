"""A smaller fleet looks for the machines that it lacks while it trains."""

import math
import threading

import pytest

from heterps_core.errors import ProvisioningError
from heterps_core.training.storage.run_directory import STOP, RunDirectory
from tasks.running.fleet_decision import Decision, Option, Way
from tasks.running.growth import Growth, with_missing
from tests.heterps_core.test_cluster import cluster, node
from tests.tasks.builders import look_and_decide


@pytest.fixture
def run(tmp_path):
    return RunDirectory(str(tmp_path / "run"))


def decide(*ways):
    """Want the first of some ways that has not failed."""
    return lambda refused: Decision(
        options=tuple(Option(way=way, refusal=refused.get(way, ""), seconds=1.0, usd=1.0) for way in ways)
    )


def growth(run, *ways, launch=lambda count: "grown", num_missing=1, interval_s=0.0):
    return Growth(run, num_missing=num_missing, decide=decide(*ways), launch=launch, interval_s=interval_s)


def test_machines_that_are_up_ask_the_training_to_stop_at_a_step(run):
    found = growth(run, Way.GROW, Way.STAY)
    look_and_decide(found)

    assert found.grown == "grown"
    assert run.exists(STOP)


def test_a_fleet_that_had_better_stay_is_left_alone(run):
    found = growth(run, Way.STAY, Way.GROW)
    look_and_decide(found)

    assert (found.grown, found.wants_replan, run.exists(STOP)) == (None, False, False)


def test_capacity_that_returns_is_taken_at_a_later_look(run):
    tries = []

    def launch(count):
        tries.append(1)
        if len(tries) < 3:
            raise ProvisioningError("none can be had")
        return "grown"

    found = growth(run, Way.GROW, Way.STAY, launch=launch)
    for _ in range(5):
        look_and_decide(found)

    assert (found.grown, len(tries)) == ("grown", 3)


def test_where_all_cannot_be_had_as_many_are_taken_as_halving_finds(run):
    tries = []

    def launch(count):
        tries.append(count)
        if count > 2:
            raise ProvisioningError("two can be had")
        return count

    found = growth(run, Way.GROW, Way.STAY, launch=launch, num_missing=5)
    look_and_decide(found)

    assert (found.grown, tries) == (2, [5, 2])


def test_between_two_looks_nothing_is_asked(run):
    tries = []

    def launch(count):
        tries.append(1)
        raise ProvisioningError("none can be had")

    found = growth(run, Way.GROW, Way.STAY, launch=launch, interval_s=math.inf)
    for _ in range(5):
        look_and_decide(found)

    assert len(tries) == 1


def test_where_growing_fails_and_staying_is_no_way_the_training_stops_to_be_planned_again(run):
    def launch(count):
        raise ProvisioningError("none can be had")

    found = growth(run, Way.GROW, Way.REPLAN, Way.STAY, launch=launch)
    look_and_decide(found)

    assert found.wants_replan
    assert run.exists(STOP)


def test_a_decision_that_takes_long_holds_nothing_up_and_is_waited_for_at_the_end(run):
    may_answer, begun, ended = threading.Event(), [], []

    def decide_slowly(refused):
        begun.append(1)
        assert may_answer.wait(20)
        ended.append(1)
        return decide(Way.REPLAN)(refused)

    found = Growth(run, num_missing=1, decide=decide_slowly, launch=lambda count: None, interval_s=0.0)
    with found:
        for _ in range(5):
            found.look()
        assert (found.is_deciding, found.wants_replan) == (True, False)
        may_answer.set()

    assert (begun, ended) == ([1], [1])
    found.look()
    assert found.wants_replan


def test_a_whole_fleet_has_nothing_to_look_for(run):
    found = growth(run, Way.GROW, num_missing=0)
    look_and_decide(found)

    assert found.grown is None


def test_machines_that_were_replaced_meanwhile_stay_where_others_come_back():
    first = cluster(*(node(name, stage=0, num_workers=1) for name in "abc"))
    other = node("a", stage=0, num_workers=1, price_usd_per_hour=0.7)
    smaller = first.next_generation({"a": other}, without=["b"])

    whole = with_missing(smaller, first)

    assert whole.nodes == (other, first.nodes[1], first.nodes[2])
    assert whole.generation == smaller.generation


@pytest.mark.parametrize("is_asked_before", [True, False])
def test_a_run_that_is_asked_to_end_does_not_go_on_because_it_grew(run, is_asked_before):
    def launch(count):
        if is_asked_before:
            run.request_stop()
        return "grown"

    found = growth(run, Way.GROW, Way.STAY, launch=launch)
    look_and_decide(found)
    if not is_asked_before:
        assert not found.is_end_asked_for()
        run.request_stop()

    assert found.is_end_asked_for()
