"""When a node counts as lost; by the clock of the flow's host alone."""

import re

import pytest

from heterps_core.training import monitor


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
