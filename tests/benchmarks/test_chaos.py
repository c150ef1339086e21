import os
import subprocess
import sys
import time

import pytest

from tests.benchmarks.chaos import JUMP_S, clock_moved_by, rows_wrong, set_jump

TELLS_TIME = (
    "import sys, time, datetime\nfor _ in sys.stdin: print(time.time(), datetime.datetime.now().timestamp(), "
    "time.monotonic(), flush=True)"
)


@pytest.mark.parametrize(
    ("attempts", "wrong"),
    [
        ([[1, 2, 3, 4]], []),
        ([[1, 2, 3], [3, 4]], []),  # from a checkpoint of step 2
        ([[1, 2], [4]], ["generation 2 trained steps 4 to 4 behind 2"]),
        ([[1, 3, 4]], ["generation 1 trained steps 1 to 4 behind 0"]),
        ([[1, 2, 2, 3, 4]], ["generation 1 trained steps 1 to 4 behind 0"]),
        ([[1, 2, 3]], ["3 of 4 steps were trained"]),
        ([], ["0 of 4 steps were trained"]),
    ],
)
def test_steps_that_are_left_out_or_trained_twice_are_found(attempts, wrong):
    assert rows_wrong(attempts, num_steps=4) == wrong


def test_the_wall_clock_of_a_process_jumps_while_it_runs_and_others_stay(tmp_path):
    jump = tmp_path / "clock"
    set_jump(jump, 0)
    moved = subprocess.Popen(
        [sys.executable, "-c", TELLS_TIME],
        env={**os.environ, **clock_moved_by(jump)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def told():
        moved.stdin.write("\n")
        moved.stdin.flush()
        return [float(word) for word in moved.stdout.readline().split()]

    for seconds in (0, JUMP_S, -JUMP_S):
        set_jump(jump, seconds)
        by_time, by_datetime, by_monotonic = told()
        assert by_time - time.time() == pytest.approx(seconds, abs=30)
        assert by_datetime - time.time() == pytest.approx(seconds, abs=30)
        assert by_monotonic == pytest.approx(time.monotonic(), abs=30)
    moved.communicate()
