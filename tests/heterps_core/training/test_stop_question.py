"""Workers stop after the same step, soon after it was asked for, however long a step takes."""

import time

import pytest
import torch.distributed as dist

from heterps_core.training.stop_question import StopQuestion
from heterps_core.training.storage.run_directory import RunDirectory
from tests.worker_processes import run_in_processes

LIMIT_S = 2.0
ASKED_AFTER_S = 1.5


def train_until_stopped(rank, location, step_s):
    """Train steps of an even length; the first worker asks for the stop. Returns step, delay and questions."""
    run = RunDirectory(location)
    broadcast, num_questions = dist.broadcast, 0

    def counted(*args, **kwargs):
        nonlocal num_questions
        num_questions += 1
        return broadcast(*args, **kwargs)

    dist.broadcast = counted
    step, started_s, asked_s = 0, time.monotonic(), None
    with StopQuestion(run, first_step=1) as stop:
        is_over = False
        while not is_over:
            if rank == 0 and asked_s is None and time.monotonic() - started_s >= ASKED_AFTER_S:
                run.request_stop()
                asked_s = time.monotonic()
            time.sleep(step_s)
            step += 1
            is_over = stop.is_asked_for(step, limit_s=20.0, lost_first_worker=lambda error: error)
    dist.broadcast = broadcast
    return step, None if asked_s is None else time.monotonic() - asked_s, num_questions


@pytest.mark.parametrize("step_s", [0.001, 0.4])
def test_all_workers_stop_after_the_same_step_within_two_seconds(tmp_path, step_s):
    first, second = run_in_processes(train_until_stopped, 2, str(tmp_path), step_s)

    assert first[0] == second[0]
    assert first[1] < LIMIT_S
    # One question of a thousand short steps would do; none is asked after most of them.
    assert first[2] == second[2] <= max(first[0] // 20, 8)
