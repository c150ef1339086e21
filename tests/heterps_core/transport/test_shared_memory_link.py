"""Replicas on one machine read what the others hold, and say who is gone or silent."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from heterps_core.transport import token_connections
from heterps_core.transport.rank_layout import LostWorkerError, RankLayout
from heterps_core.transport.shared_memory import SMALLEST_BUFFER_BYTES, aligned
from heterps_core.transport.shared_memory_link import SharedMemoryLink
from infra.workspace import free_loopback_port
from tests.worker_processes import run_in_processes

NUM_MEMBERS = 3
SILENCE_LIMIT_S = 2.0


def connect(silence_limit_s: float = 60.0) -> SharedMemoryLink:
    group = dist.group.WORLD
    layout = RankLayout((tuple(range(dist.get_world_size())),))
    link = SharedMemoryLink.connect(group, layout=layout, silence_limit_s=silence_limit_s)
    if link is None:
        pytest.skip("memory cannot be shared here")
    return link


def tensors_of(member: int, step: int) -> list[torch.Tensor]:
    """Return what a member puts out in a step: of every type and size, and nothing at times."""
    generator = torch.Generator().manual_seed(100 * step + member)
    if (step + member) % 4 == 3:
        return []
    # In the last steps more than an outbox has room for at first.
    num_rows = (member + 1) * 7 * (1 if step < 4 else SMALLEST_BUFFER_BYTES // 64)
    wide = torch.randn(num_rows, 9, generator=generator)
    return [
        wide[:, 2:7],
        torch.randint(0, 2**40, (num_rows, 1), generator=generator),
        wide.to(torch.bfloat16),
        torch.empty(0, 5),
    ]


def exchange_all(rank: int, link: SharedMemoryLink) -> list[int]:
    assert (link.member, link.num_members) == (rank, NUM_MEMBERS)
    outbox, other = link.new_outbox(), link.new_outbox()
    num_equal = []
    for step in range(6):
        for tensor in tensors_of(rank, step):
            outbox.append(tensor)
        other.append(torch.full((1, 1), rank + 10.0 * step))
        found = outbox.exchange()
        # Who is slow to read must still find what was there.
        time.sleep(0.05 * (rank == step % NUM_MEMBERS))
        for member, tensors in enumerate(found):
            expected = tensors_of(member, step)
            assert len(tensors) == len(expected)
            assert all(map(torch.equal, tensors, expected))
            num_equal.append(len(expected))
        assert [tensor.item() for (tensor,) in other.exchange()] == [
            10.0 * step + n for n in range(NUM_MEMBERS)
        ]
    return num_equal


def test_everyone_reads_what_everyone_put_out(answers):
    counts = [answer["num_equal"] for answer in answers]

    assert counts[0] == counts[1] == counts[2]
    assert sum(counts[0]) > 40


def write_in_turns(rank: int, link: SharedMemoryLink) -> list[list[float]]:
    tensor = link.new_tensor(4, 3)
    for turn in range(NUM_MEMBERS):
        if turn == rank:
            tensor[rank] = rank + 1
            tensor[3] += 1
        link.wait_for_all()
    return tensor.tolist()


def test_tensors_begin_at_cache_lines():
    assert [aligned(num_bytes) for num_bytes in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_a_shared_tensor_is_the_same_memory_in_all_replicas(answers):
    expected = [[1.0] * 3, [2.0] * 3, [3.0] * 3, [3.0] * 3]

    assert [answer["written"] for answer in answers] == [expected] * NUM_MEMBERS


def lose_one(rank: int, port: int, signal_number: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    link = connect(SILENCE_LIMIT_S)
    link.wait_for_all()
    if rank == 1:
        # A group of its own: where that of the tests has no shell behind it, the kernel hangs up on a group with a
        # stopped member as soon as another one ends.
        os.setpgid(0, 0)
        os.kill(os.getpid(), signal_number)
    try:
        link.wait_for_all()
    except LostWorkerError as error:
        results.put((str(error), error.lost))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal_number", "observed"),
    [(signal.SIGKILL, "its process has ended"), (signal.SIGSTOP, "it is silent")],
)
def test_a_replica_that_ends_or_stands_still_is_named(signal_number, observed):
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_loopback_port()
    processes = [
        context.Process(target=lose_one, args=(rank, port, signal_number, results)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        message, lost = results.get(timeout=300)
    finally:
        for process in processes:
            process.kill()
            process.join()

    assert lost == (1, 0, 1)
    assert message.startswith(f"worker 1 (stage 0, replica 1) must answer within {SILENCE_LIMIT_S:.0f} s")
    assert observed in message


def fail_to_connect(rank: int) -> tuple[bool, list[str]]:
    boot_id = token_connections.BOOT_ID
    if rank == 1:
        token_connections.BOOT_ID = Path("/no/such/file")
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("heterps_core").addHandler(handler)
    layout = RankLayout((tuple(range(NUM_MEMBERS)),))
    link = SharedMemoryLink.connect(dist.group.WORLD, layout=layout, silence_limit_s=60.0)
    token_connections.BOOT_ID = boot_id
    return link is None, records


def test_where_one_cannot_connect_all_do_without(answers):
    for answer in answers:
        is_none, (message,) = answer["failed"]
        assert is_none
        assert message.startswith("workers of one machine exchange rows by messages")
        assert "/no/such/file" in message


def try_all(rank: int) -> dict[str, Any]:
    failed = fail_to_connect(rank)
    link = connect()
    return {"failed": failed, "num_equal": exchange_all(rank, link), "written": write_in_turns(rank, link)}


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """What each replica saw; starting processes for each test would take most of the time."""
    return run_in_processes(try_all, NUM_MEMBERS)
