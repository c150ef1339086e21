"""A machine of three that has become slow is told of, and leaves where it stays slow and the others do not."""

import logging
from dataclasses import replace

import pytest

from heterps_core.training.node.node_life import HEARTBEAT, heartbeat, node_key
from heterps_core.training.storage.run_directory import RunDirectory
from tasks.running.stragglers import LOOKS, STOP_REASON, Stragglers
from tests.heterps_core.test_cluster import cluster, node
from tests.waiting import wait_for

FLEET = cluster(*(node(name, stage=0, num_workers=1) for name in "abc"))


@pytest.fixture
def run(tmp_path):
    return RunDirectory(str(tmp_path / "run"))


@pytest.fixture
def seen(run):
    return Stragglers(run, interval_s=0.0)


def beat(run, **probe_seconds):
    for name, seconds in probe_seconds.items():
        run.write_json(node_key(name, HEARTBEAT), {"probe_seconds": seconds})


def look(run, seen, *, times=1, fleet=FLEET, **probe_seconds):
    beat(run, **probe_seconds)
    for _ in range(times):
        seen.look(fleet)


def test_a_machine_that_stays_slow_leaves_and_the_run_goes_on(run, seen):
    look(run, seen, a=0.003, b=0.004, c=0.003)
    look(run, seen, times=LOOKS - 1, a=0.003, b=0.009, c=0.003)
    assert (seen.left, run.stop_reason()) == (None, None)

    look(run, seen)

    assert seen.left.node_ids == ("b",)
    assert "b, which takes 2.2 times its best time" in seen.left.message
    assert run.stop_reason() == STOP_REASON


def test_each_look_at_which_a_machine_is_slow_is_told(run, seen, caplog):
    caplog.set_level(logging.INFO)
    look(run, seen, a=0.003, b=0.004, c=0.003)
    look(run, seen, a=0.003, b=0.012, c=0.003)

    assert "b takes 3.0 times its best time, others 1.0" in caplog.text


def test_a_machine_that_is_slow_for_a_moment_stays(run, seen):
    look(run, seen, a=0.003, b=0.003, c=0.003)
    for _ in range(LOOKS):
        look(run, seen, times=LOOKS - 1, b=0.009)
        look(run, seen, b=0.003)

    assert seen.left is None


def test_what_slows_all_machines_is_no_ground_to_replace_one(run, seen):
    look(run, seen, a=0.003, b=0.003, c=0.003)
    look(run, seen, times=2 * LOOKS, a=0.009, b=0.012, c=0.009)

    assert seen.left is None


def test_slower_machines_of_other_types_are_held_to_their_own_best(run, seen):
    look(run, seen, times=2 * LOOKS, a=0.003, b=0.030, c=0.003)

    assert seen.left is None


def test_a_machine_in_the_place_of_another_has_a_best_time_of_its_own(run, seen):
    look(run, seen, a=0.003, b=0.003, c=0.003)
    other = replace(node("b", stage=0, num_workers=1), provider_instance_id="i-other")
    following = FLEET.next_generation({"b": other})

    look(run, seen, times=2 * LOOKS, fleet=following, b=0.030)

    assert seen.left is None


def test_a_lone_machine_stays_as_no_other_waits_for_it(run, seen):
    lone = cluster(FLEET.nodes[0])
    look(run, seen, fleet=lone, a=0.003)
    look(run, seen, times=2 * LOOKS, fleet=lone, a=0.030)

    assert seen.left is None


def test_a_run_that_is_asked_to_stop_already_ends_by_that(run, seen):
    run.request_stop()
    look(run, seen, a=0.003, b=0.003, c=0.003)
    look(run, seen, times=2 * LOOKS, b=0.030)

    assert (seen.left, run.stop_reason()) == (None, "")


def test_a_machine_of_its_own_tells_its_speed_behind_its_first_sign_of_life(run, monkeypatch):
    monkeypatch.setenv("HETERPS_NODE_IS", "machine")

    def told():
        return (run.read_json(node_key("a", HEARTBEAT)) or {}).get("probe_seconds")

    with heartbeat(run, "a"):
        assert 0 < wait_for(told, what="a sign of life with a speed") < 1


def test_a_process_of_this_machine_tells_no_speed(run, monkeypatch):
    monkeypatch.setenv("HETERPS_NODE_IS", "process")

    with heartbeat(run, "a"):
        beat = wait_for(lambda: run.read_json(node_key("a", HEARTBEAT)), what="a sign of life")

    assert "probe_seconds" not in beat
