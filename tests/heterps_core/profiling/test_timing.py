import itertools

import numpy as np
import pytest

from heterps_core.profiling.timing import Phase, Timing, time_phases


def test_median_and_spread_are_those_of_numpy():
    times_ms = np.random.default_rng(0).exponential(size=37).tolist()

    timing = Timing.from_repeats(times_ms)

    expected = np.quantile(times_ms, [0.1, 0.5, 0.9])
    np.testing.assert_allclose([timing.low_ms, timing.median_ms, timing.high_ms], expected)
    assert timing.num_repeats == 37


class SlowClock:
    """A clock that only phases move on."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def phase(self, name, *seconds):
        durations = itertools.cycle(seconds)

        def run():
            self.now_s += next(durations)

        return Phase(name, run)


def test_each_phase_is_timed_by_itself_and_warm_up_is_left_out():
    clock = SlowClock()
    # The warm-up takes 9 s a round, the rounds after it 1 to 5 s.
    slow = clock.phase("slow", 9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    phases = [slow, clock.phase(None, 5.0), clock.phase("fast", 0.25)]

    timings = time_phases(phases, budget_s=0.0, clock=clock)

    assert {name: timing.median_ms for name, timing in timings.items()} == {"slow": 3_000.0, "fast": 250.0}


@pytest.mark.parametrize(("budget_s", "num_repeats"), [(0.0, 5), (10.0, 7), (1_000.0, 20)])
def test_repeats_until_the_budget_is_spent_but_within_limits(budget_s, num_repeats):
    clock = SlowClock()

    timings = time_phases([clock.phase("only", 1.0)], budget_s=budget_s, max_repeats=20, clock=clock)

    assert timings["only"].num_repeats == num_repeats
