"""Replicas that send one another bytes get all of them, in order, and say who is gone, silent or a stranger."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist

from heterps_core.transport import token_connections
from heterps_core.transport.peer_sockets import PeerSockets
from heterps_core.transport.rank_layout import LostWorkerError
from tests.worker_processes import run_in_processes

NUM_MEMBERS = 3
LARGE = 300_000
"""Rows that no connection takes at once."""


def connect(silence_limit_s: float = 60.0) -> PeerSockets:
    assert dist.group.WORLD is not None
    return PeerSockets.connect(dist.group.WORLD, silence_limit_s=silence_limit_s)


def rows_of(sender: int, receiver: int, step: int) -> torch.Tensor:
    """Rows of which some steps have none, and some more than a connection takes at once."""
    num_rows = [0, 5, 1 + receiver, LARGE if (sender, receiver) != (0, 1) else 0][(step + sender) % 4]
    generator = torch.Generator().manual_seed(100 * step + 10 * sender + receiver)
    return torch.randint(0, 2**60, (num_rows, 2), generator=generator)


def exchange_all(rank: int) -> list[bool]:
    sockets = connect()
    assert (sockets.member, sockets.num_members) == (rank, NUM_MEMBERS)
    members, found = range(NUM_MEMBERS), []
    for step in range(4):
        sent = [rows_of(rank, other, step) for other in members]
        expected = torch.cat([rows_of(other, rank, step) for other in members])
        counts = [len(rows_of(other, rank, step)) for other in members]
        own = torch.full((NUM_MEMBERS, 3), float(rank)).bfloat16()
        received, halves = sockets.exchange_rows(
            [torch.cat(sent), own], [[len(rows) for rows in sent], [1] * 3], [counts, [1] * 3]
        )
        found.append(torch.equal(received, expected))
        found.append(halves[:, 0].tolist() == [0.0, 1.0, 2.0])
        answers = sockets.exchange_sized([rows.numpy().tobytes() for rows in sent])
        found.append(b"".join(bytes(answer) for answer in answers) == expected.numpy().tobytes())
    return found


def test_each_member_gets_what_the_others_send():
    assert all(all(found) for found in run_in_processes(exchange_all, NUM_MEMBERS))


def lose_one(rank: int, ends: bool) -> tuple[str, object] | None:
    sockets = connect(silence_limit_s=1.0)
    sockets.exchange_sized([b"here"] * NUM_MEMBERS)
    if rank == 1:
        if ends:
            del sockets
        else:
            # Longer than the limit of the others; what they find is not timed.
            dist.barrier()
        return None
    try:
        sockets.exchange_sized([b"again"] * NUM_MEMBERS)
    except LostWorkerError as error:
        found = (str(error), error.lost)
    if not ends:
        dist.barrier()
    return found


@pytest.mark.parametrize(
    ("ends", "observed"), [(True, "its connection broke"), (False, "it is silent")], ids=["ends", "is silent"]
)
def test_a_member_that_is_gone_or_silent_is_named(ends, observed):
    first, _, third = run_in_processes(lose_one, NUM_MEMBERS, ends)

    for message, lost in (first, third):
        assert observed in message
        assert lost == (1, 0, 1)


def connect_beside_a_stranger(rank: int, shown: bytes) -> bool:
    if rank == 0:
        # Before the others come, someone without a token is at the listener.
        token_connections._TOKEN_LIMIT_S = 1.0
        create_server = socket.create_server

        def create_and_call(*arguments, **options):
            listener = create_server(*arguments, **options)
            stranger = socket.create_connection(listener.getsockname())
            stranger.sendall(shown)
            strangers.append(stranger)
            return listener

        strangers = []
        token_connections.socket.create_server = create_and_call
    answers = connect().exchange_sized([bytes([rank])] * NUM_MEMBERS)
    return [answer[0] for answer in answers] == [0, 1, 2]


@pytest.mark.parametrize("shown", [bytes([2, 0, 0, 0]) + bytes(32), b""], ids=["another token", "no token"])
def test_a_stranger_without_the_token_is_refused(shown):
    assert run_in_processes(connect_beside_a_stranger, NUM_MEMBERS, shown) == [True] * NUM_MEMBERS
