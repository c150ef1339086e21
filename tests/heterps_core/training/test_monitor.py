"""When a node counts as lost; by the clock of the flow's host alone."""

import os
import re
from pathlib import Path

import pytest

from heterps_core.cluster import Cluster, Node
from heterps_core.hardware import Market
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training import monitor
from heterps_core.training.job import TrainingConfig, TrainingJob
from heterps_core.training.node.node_life import HEARTBEAT, node_key
from heterps_core.training.outcome import Complete, MachinesLost
from heterps_core.training.storage.run_directory import JOB, RESULT, SHARES, RunDirectory
from heterps_core.training.storage.verified_files import read_signed_json

CLUSTER = Cluster(
    run_id="test",
    provider="local",
    nodes=tuple(
        Node(
            node_id=name,
            address="127.0.0.1",
            device_type="cpu",
            instance_type="local",
            market=Market.ON_DEMAND,
            stage=stage,
            num_workers=1,
            price_usd_per_hour=0.1,
            provider_instance_id=name,
        )
        for stage, name in enumerate(("first", "second"))
    ),
    rendezvous="127.0.0.1:29500",
    created_at="2026-11-24T00:00:00+00:00",
)


class Clock:
    """Stands still until it is set forward."""

    now_s = 1_000.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(monitor, "time", clock)
    return clock


def test_a_node_whose_clock_is_wrong_by_hours_is_alive_while_its_beat_changes(clock):
    pulse = monitor.Pulse(first_limit_s=300.0)
    for stamp in (5, 4, 7, 6):
        assert pulse.silence("node", stamp) is None
        clock.now_s += 25.0

    clock.now_s += 6.0
    assert "node has been silent for 31 s" in pulse.silence("node", 6)


def test_a_beat_that_can_no_longer_be_seen_counts_as_silence(clock):
    pulse = monitor.Pulse(first_limit_s=300.0)
    assert pulse.silence("node", 5) is None
    clock.now_s += 31.0

    assert "silent for 31 s" in pulse.silence("node", None)


def test_a_machine_may_take_minutes_to_boot_but_not_for_ever(clock):
    pulse = monitor.Pulse(first_limit_s=300.0)
    clock.now_s += 299.0
    assert pulse.silence("node", None) is None
    clock.now_s += 2.0

    said = pulse.silence("node", None)
    assert re.search(r"within 300 s of its launch, but node gave none.*system log", said)


class Waiting(Clock):
    """Sets itself forward where anything waits; a node beats meanwhile."""

    def __init__(self, run, *, beating):
        self.beat = Path(run.location) / node_key(beating, HEARTBEAT)

    def sleep(self, seconds):
        self.now_s += 5.0
        os.utime(self.beat, (self.now_s, self.now_s))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Two nodes that have given a sign of life, of which the second goes on to."""
    run = RunDirectory(str(tmp_path))
    for node in CLUSTER.nodes:
        run.write_json(node_key(node.node_id, HEARTBEAT), {})
    monkeypatch.setattr(monitor, "time", Waiting(run, beating="second"))
    return run


def follow(run):
    return monitor.follow_training(run, CLUSTER, on_progress=lambda progress: None)


def test_a_node_that_falls_silent_before_any_step_is_lost_though_others_wait_for_it(run):
    outcome = follow(run)

    assert isinstance(outcome, MachinesLost)
    assert outcome.node_ids == ("first",)


def test_a_node_that_falls_silent_after_the_result_is_not_missed(run):
    run.write_json(RESULT, {"is_complete": True, "judgements": {}})

    assert isinstance(follow(run), Complete)


@pytest.mark.parametrize("shares", [[[48, 16], [64]], [[32, 16, 16], [64]], None])
def test_workers_that_start_again_begin_with_the_last_shares_if_they_are_as_many(shares, tmp_path):
    run = RunDirectory(str(tmp_path))
    job = TrainingJob(
        run_id="test",
        model="ctrdnn",
        dataset="/data",
        stages=(Stage(0, 0, "cpu", 2), Stage(1, 7, "cpu", 1)),
        config=TrainingConfig(batch_size=64, num_microbatches=1, num_epochs=1, seed=0),
    )
    monitor.submit_job(run, job)
    if shares is not None:
        run.write_json(SHARES, shares)

    monitor.publish_cluster(run, CLUSTER.next_generation())

    found = TrainingJob.from_json(read_signed_json(run, JOB))
    is_kept = shares == [[48, 16], [64]]
    assert found.shares == (((48, 16), (64,)) if is_kept else ((1, 1), (1,)))
    # Those of other numbers of replicas are of workers that are gone, also for later generations and reports.
    assert run.read_json(SHARES) == (shares if is_kept else None)
    monitor.submit_job(run, job)
    assert run.read_json(SHARES) is None
