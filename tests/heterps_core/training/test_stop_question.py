"""Workers stop after the same step, soon after it was asked for, however long a step takes."""

import pytest
import torch.distributed as dist

from heterps_core.training import stop_question
from heterps_core.training.stop_question import LOOK_INTERVAL_S, StopQuestion
from heterps_core.training.storage.run_directory import RunDirectory
from tests.worker_processes import run_in_processes

LIMIT_S = 2.0
ASKED_AFTER_S = 1.5


class Clock:
    """Goes on by the length of a step with each one."""

    now_s = 0.0

    def monotonic(self):
        return self.now_s


def train_until_stopped(rank, location, step_s):
    """Train steps of an even length; the first worker asks for the stop. Returns step, delay and questions."""
    run = RunDirectory(location)
    clock = stop_question.time = Clock()
    broadcast, num_questions = dist.broadcast, 0

    def counted(*args, **kwargs):
        nonlocal num_questions
        num_questions += 1
        return broadcast(*args, **kwargs)

    dist.broadcast = counted
    step, asked_s = 0, None
    with StopQuestion(run, first_step=1) as stop:
        is_over = False
        while not is_over:
            if rank == 0 and asked_s is None and clock.now_s >= ASKED_AFTER_S:
                run.request_stop()
                stop._look()
                asked_s = clock.now_s
            clock.now_s += step_s
            step += 1
            is_over = stop.is_asked_for(step, limit_s=60.0, lost_first_worker=lambda error: error)
    dist.broadcast = broadcast
    return step, None if asked_s is None else clock.now_s - asked_s, num_questions


@pytest.mark.parametrize("step_s", [0.001, 0.4])
def test_all_workers_stop_after_the_same_step_within_two_seconds(tmp_path, step_s):
    first, second = run_in_processes(train_until_stopped, 2, str(tmp_path), step_s)

    assert first[0] == second[0]
    # The mark is seen at the next look, which comes at once here.
    assert first[1] + LOOK_INTERVAL_S < LIMIT_S
    # One question of a thousand short steps would do; none is asked after most of them.
    assert first[2] == second[2] <= max(first[0] // 20, 8)
