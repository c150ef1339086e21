"""Stages on one machine read each other's rows where they lie, and say who is gone or silent."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest
import torch

from heterps_core.training.pipeline.shared_memory_boundary import SharedMemoryBoundary
from heterps_core.training.pipeline.stage_exchange import StageSide, replica_slice
from heterps_core.training.pipeline.stage_place import connect_neighbours
from heterps_core.transport import shared_memory
from heterps_core.transport.rank_layout import LostWorkerError, RankLayout
from heterps_core.transport.shared_memory import SMALLEST_BUFFER_BYTES
from tests.worker_processes import run_in_processes

WIDTH = 8
LAYOUT = RankLayout(((0, 1), (2, 3, 4)))
# One row leaves most replicas without any; the last is more than a buffer has room for at first.
STEP_ROWS = [7, 1, 12, 12, 5, SMALLEST_BUFFER_BYTES // WIDTH]
NUM_MICROBATCHES = 3


def new_boundary(layout: RankLayout, *, rank: int, silence_limit_s: float = 60.0) -> SharedMemoryBoundary:
    stage, replica = layout.position(rank)
    shared = connect_neighbours(layout, rank=rank)
    side = StageSide(layout=layout, stage=stage, replica=replica, neighbour=1 - stage)
    return SharedMemoryBoundary(side, width=WIDTH, silence_limit_s=silence_limit_s, shared=shared[1 - stage])


def rows_of(step: int, microbatch: int) -> torch.Tensor:
    """Return all rows of a micro-batch."""
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    return torch.randn(STEP_ROWS[step], WIDTH, generator=generator)


def send_or_take_all(rank: int) -> int:
    """Let the first stage run ahead of the second, which reads what it has only at the end of a step."""
    boundary = new_boundary(LAYOUT, rank=rank)
    stage, replica = LAYOUT.position(rank)
    num_taken = 0
    for step, num_rows in enumerate(STEP_ROWS):
        mine = replica_slice(num_rows, len(LAYOUT.ranks[stage]), replica)
        expected = [rows_of(step, number)[mine.first : mine.stop] for number in range(NUM_MICROBATCHES)]
        if stage == 0:
            for rows_BW in expected:
                boundary.send(rows_BW, num_rows)
        else:
            arriving = [boundary.receive(num_rows) for _ in expected]
            taken = [receiving.wait() for receiving in arriving]
            time.sleep(0.05)
            assert all(map(torch.equal, taken, expected))
            num_taken += sum(map(len, taken))
        boundary.wait_until_sent()
    return num_taken


def test_rows_arrive_whole_and_stay_until_the_end_of_the_step_however_far_the_sender_is_ahead():
    taken = run_in_processes(send_or_take_all, 5)

    assert taken[:2] == [0, 0]
    assert sum(taken) == NUM_MICROBATCHES * sum(STEP_ROWS)


def wait_for_a_neighbour_that_sends_nothing(rank: int) -> tuple[str, bool, float]:
    boundary = new_boundary(RankLayout(((0,), (1,))), rank=rank, silence_limit_s=0.5)
    if rank == 1:
        time.sleep(1.5)
        return "", False, 0.0
    receiving = boundary.receive(4)
    was_there = receiving.is_there()
    started_s = time.monotonic()
    with pytest.raises(LostWorkerError) as caught:
        receiving.wait()
    return str(caught.value), was_there, time.monotonic() - started_s


def test_a_silent_neighbour_is_named_at_the_limit():
    message, was_there, waited_s = run_in_processes(wait_for_a_neighbour_that_sends_nothing, 2)[0]

    assert "worker 1 (stage 1, replica 0)" in message
    assert "is silent" in message
    assert not was_there
    assert waited_s >= 0.5


def wait_for_a_neighbour_that_is_gone(rank: int) -> str:
    boundary = new_boundary(RankLayout(((0,), (1,))), rank=rank)
    if rank == 1:
        # As the system does when a process ends.
        boundary._shared.peers[0].connection.close()
        return ""
    receiving = boundary.receive(4)
    with pytest.raises(LostWorkerError) as caught:
        receiving.wait()
    with pytest.raises(LostWorkerError):
        boundary.send(torch.zeros(4, WIDTH), 4)
    boundary.wait_until_sent()
    return str(caught.value)


def test_a_neighbour_that_is_gone_is_named_at_once():
    message = run_in_processes(wait_for_a_neighbour_that_is_gone, 2)[0]

    assert "worker 1 (stage 1, replica 0)" in message
    # One that is only silent is said to be so.
    assert "its process has ended" in message


def connect_where_memory_cannot_be_shared(rank: int) -> tuple[int, list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    shared_memory.logger.addHandler(handler)
    if rank == 1:
        del os.memfd_create
    return len(connect_neighbours(RankLayout(((0,), (1,))), rank=rank)), messages


def test_all_send_messages_where_one_cannot_share_memory():
    for num_shared, messages in run_in_processes(connect_where_memory_cannot_be_shared, 2):
        assert num_shared == 0
        (message,) = messages
        assert "exchange rows by messages" in message


def connect_with_other_machines(rank: int, folder: str) -> list[int]:
    shared_memory.BOOT_ID = Path(folder) / f"machine-{rank // 3}"
    layout = RankLayout(((0,), (1,), (2, 3), (4,), (5,)))
    device = torch.device("meta" if rank == 5 else "cpu")
    return sorted(connect_neighbours(layout, rank=rank, device=device))


def test_only_stages_whose_replicas_are_all_on_the_cores_of_one_machine_share_memory(tmp_path):
    # Ranks 0 to 2 are on one machine, 3 to 5 on another, and 5 computes on something else.
    for machine in (0, 1):
        (tmp_path / f"machine-{machine}").write_text(f"machine {machine}")
    shared = run_in_processes(connect_with_other_machines, 6, str(tmp_path))

    assert shared == [[1], [0], [], [], [], []]
