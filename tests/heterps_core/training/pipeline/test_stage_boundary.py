"""Neighbouring stages get each other's rows, in memory and over sockets, and say who is gone or silent."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from heterps_core.training.pipeline.shared_memory_boundary import SharedMemoryBoundary, SharedNeighbour
from heterps_core.training.pipeline.stage_boundary import StageBoundary
from heterps_core.training.pipeline.stage_exchange import StageSide, replica_slice
from heterps_core.training.pipeline.stage_place import connect_neighbours
from heterps_core.transport.rank_layout import LostWorkerError, RankLayout
from heterps_core.transport.shared_memory import SMALLEST_BUFFER_BYTES
from tests.worker_processes import run_in_processes

WIDTH = 8
PAIR = RankLayout(((0,), (1,)))
LAYOUT = RankLayout(((0, 1), (2, 3, 4)))
MORE_ROWS_THAN_A_CONNECTION_TAKES = 32 * 2**20 // (4 * WIDTH)
# One row leaves most replicas without any; the last is more than a buffer has room for at first.
STEP_ROWS = [7, 1, 12, 12, 5, SMALLEST_BUFFER_BYTES // WIDTH]
NUM_MICROBATCHES = 3

each_kind = pytest.mark.parametrize("shares_memory", [False, True], ids=["over sockets", "in memory"])


def new_boundary(
    layout: RankLayout, *, rank: int, shares_memory: bool, silence_limit_s: float = 60.0
) -> StageBoundary | SharedMemoryBoundary:
    stage, replica = layout.position(rank)
    found = connect_neighbours(layout, rank=rank, shares_memory=shares_memory)[1 - stage]
    assert isinstance(found, SharedNeighbour) == shares_memory
    side = StageSide(layout=layout, stage=stage, replica=replica, neighbour=1 - stage)
    if isinstance(found, SharedNeighbour):
        return SharedMemoryBoundary(side=side, width=WIDTH, silence_limit_s=silence_limit_s, shared=found)
    return StageBoundary(side=side, width=WIDTH, silence_limit_s=silence_limit_s, connections=found)


def rows_of(num_rows: int, *, step: int, microbatch: int) -> torch.Tensor:
    """Return all rows of a micro-batch."""
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    return torch.randn(num_rows, WIDTH, generator=generator)


def send_or_take_all(rank: int, shares_memory: bool, step_rows: list[int]) -> int:
    """Let the first stage run ahead of the second, which reads what it has only at the end of a step."""
    boundary = new_boundary(LAYOUT, rank=rank, shares_memory=shares_memory)
    stage, replica = LAYOUT.position(rank)
    num_taken = 0
    for step, num_rows in enumerate(step_rows):
        mine = replica_slice(num_rows, len(LAYOUT.ranks[stage]), replica)
        expected = [
            rows_of(num_rows, step=step, microbatch=number)[mine.first : mine.stop]
            for number in range(NUM_MICROBATCHES)
        ]
        if stage == 0:
            for rows_BW in expected:
                boundary.send(rows_BW, num_rows)
        else:
            arriving = [boundary.receive(num_rows) for _ in expected]
            taken = [receiving.wait() for receiving in arriving]
            # The sender runs ahead meanwhile; rows that were taken stay as they are.
            time.sleep(0.05)
            assert all(map(torch.equal, taken, expected))
            num_taken += sum(map(len, taken))
        boundary.end_step(is_drained=True)
    return num_taken


@each_kind
def test_rows_arrive_whole_and_stay_until_the_end_of_the_step_however_far_the_sender_is_ahead(shares_memory):
    # Sockets take no more than some megabytes before they are read.
    step_rows = STEP_ROWS if shares_memory else [*STEP_ROWS, MORE_ROWS_THAN_A_CONNECTION_TAKES, 3]

    taken = run_in_processes(send_or_take_all, 5, shares_memory, step_rows)

    assert taken[:2] == [0, 0]
    assert sum(taken) == NUM_MICROBATCHES * sum(step_rows)


def send_much_to_one_another(rank: int) -> bool:
    boundary = new_boundary(PAIR, rank=rank, shares_memory=False)
    sent = [rows_of(MORE_ROWS_THAN_A_CONNECTION_TAKES, step=rank, microbatch=each) for each in range(2)]
    expected = [
        rows_of(MORE_ROWS_THAN_A_CONNECTION_TAKES, step=1 - rank, microbatch=each) for each in range(2)
    ]
    for rows_BW in sent:
        boundary.send(rows_BW, len(rows_BW))
        boundary.end_step(is_drained=False)
    arriving = [boundary.receive(len(rows_BW)) for rows_BW in expected]
    return all(torch.equal(each.wait(), rows_BW) for each, rows_BW in zip(arriving, expected, strict=True))


def test_two_workers_may_send_more_than_connections_take_before_either_reads():
    assert run_in_processes(send_much_to_one_another, 2) == [True, True]


def wait_for_a_neighbour_that_sends_nothing(rank: int, shares_memory: bool) -> tuple[str, bool, float]:
    boundary = new_boundary(PAIR, rank=rank, shares_memory=shares_memory, silence_limit_s=0.5)
    if rank == 1:
        dist.barrier()  # it is there until the other has seen its silence
        return "", False, 0.0
    receiving = boundary.receive(4)
    was_there = receiving.is_there()
    started_s = time.monotonic()
    with pytest.raises(LostWorkerError) as caught:
        receiving.wait()
    waited_s = time.monotonic() - started_s
    dist.barrier()
    return str(caught.value), was_there, waited_s


@each_kind
def test_a_silent_neighbour_is_named_at_the_limit(shares_memory):
    message, was_there, waited_s = run_in_processes(
        wait_for_a_neighbour_that_sends_nothing, 2, shares_memory
    )[0]

    assert "worker 1 (stage 1, replica 0)" in message
    assert "is silent" in message
    assert not was_there
    assert waited_s >= 0.5


def send_to_a_neighbour_that_reads_nothing(rank: int) -> str:
    boundary = new_boundary(PAIR, rank=rank, shares_memory=False, silence_limit_s=0.5)
    if rank == 1:
        dist.barrier()
        return ""
    boundary.send(torch.zeros(MORE_ROWS_THAN_A_CONNECTION_TAKES, WIDTH), MORE_ROWS_THAN_A_CONNECTION_TAKES)
    with pytest.raises(LostWorkerError) as caught:
        boundary.end_step(is_drained=True)
    dist.barrier()
    return str(caught.value)


def test_a_neighbour_that_takes_no_rows_is_named_at_the_limit():
    message = run_in_processes(send_to_a_neighbour_that_reads_nothing, 2)[0]

    assert "worker 1 (stage 1, replica 0)" in message
    assert "is silent" in message


def send_until_lost(boundary: StageBoundary | SharedMemoryBoundary) -> None:
    """A connection may take some messages before it learns that its other end is closed."""
    while True:
        boundary.send(torch.zeros(4, WIDTH), 4)


def wait_for_a_neighbour_that_is_gone(rank: int, shares_memory: bool) -> str:
    boundary = new_boundary(PAIR, rank=rank, shares_memory=shares_memory)
    if rank == 1:
        # As the system does when a process ends.
        if isinstance(boundary, StageBoundary):
            boundary._peers[0]._connection.close()
        else:
            boundary.shared.peers[0].connection.close()
        return ""
    receiving = boundary.receive(4)
    with pytest.raises(LostWorkerError) as caught:
        receiving.wait()
    with pytest.raises(LostWorkerError):
        send_until_lost(boundary)
    boundary.end_step(is_drained=True)
    return str(caught.value)


@each_kind
def test_a_neighbour_that_is_gone_is_named_at_once(shares_memory):
    message = run_in_processes(wait_for_a_neighbour_that_is_gone, 2, shares_memory)[0]

    assert "worker 1 (stage 1, replica 0)" in message
    # One that is only silent is said to be so.
    assert "its process has ended" in message
