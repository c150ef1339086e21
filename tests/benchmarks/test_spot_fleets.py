"""A market of two machines that loses one of them from the first hour to the second, by hand.

The fleet has a machine on-demand besides. It starts in 120 s, a change of size takes 10 s, and checkpoints are 60 s
to 600 s apart.
"""

import numpy as np
import pytest

from heterps_core.training.storage.run_directory import RunDirectory
from tests.benchmarks.spot_fleets import Run, Trace, as_decided, clairvoyant, restarted, steps

HOUR = 3_600.0
MARKET = Trace(
    "by hand", *steps([0.0, HOUR, HOUR, 2 * HOUR, 2 * HOUR, 4 * HOUR, 20 * HOUR], [2, 2, 1, 1, 2, 2, 2])
)
END = 4 * HOUR


def test_rows_of_one_moment_are_a_step_and_equal_counts_are_one():
    assert (MARKET.times.tolist(), MARKET.counts.tolist()) == ([0.0, HOUR, 2 * HOUR, 20 * HOUR], [2, 1, 2, 2])


def test_the_median_of_counts_is_that_of_the_time_in_which_there_are_any():
    trace = Trace("by hand", np.array([0.0, 10.0, 13.0, 15.0, 16.0]), np.array([0, 1, 3, 5, 5]))

    assert trace.typical() == 1


def test_the_clairvoyant_pays_the_start_of_machines_and_each_change_of_size():
    most = clairvoyant(MARKET, 0.0, END, 2)

    assert most == pytest.approx(
        3 * (HOUR - 120)  # three machines once they have started
        + 2 * (HOUR - 10 + 120)  # two of them, until the third has started that is there again
        + 3 * (2 * HOUR - 120 - 10)
    )


def test_a_run_that_shrinks_and_grows_trains_nearly_as_much_and_one_that_starts_again_trains_less(tmp_path):
    run, restarting = (Run(MARKET, 0.0, 2, END) for _ in range(2))

    as_decided(run, RunDirectory(str(tmp_path)))
    restarted(restarting, grows=False)

    most = clairvoyant(MARKET, 0.0, END, 2)
    # It redoes at most what is between two checkpoints, and may look 180 s after the machine is there again.
    assert most - 3 * 600 - 180 - 3 * 10 <= run.trained < most
    # Two machines to the end.
    assert restarting.trained == pytest.approx(3 * (HOUR - 120) + 2 * (3 * HOUR - 180), abs=3 * 600)
    assert restarting.trained < run.trained
    assert (run.num_losses, run.present) == (1, 2)
