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


MACHINES = {"one machine": (0, 0, 0), "three machines": (0, 1, 2), "two machines": (0, 0, 1)}
"""Of each member: those of one are connected by Unix sockets, the others by TCP."""

on_machines = pytest.mark.parametrize("machines", MACHINES.values(), ids=MACHINES)


def connect(machines: tuple[int, ...], silence_limit_s: float = 60.0) -> PeerSockets:
    assert dist.group.WORLD is not None
    token_connections.this_machine = lambda: str(machines[dist.get_rank()])
    return PeerSockets.connect(dist.group.WORLD, silence_limit_s=silence_limit_s)


def rows_of(sender: int, receiver: int, step: int) -> torch.Tensor:
    """Rows of which some steps have none, and some more than a connection takes at once."""
    num_rows = [0, 5, 1 + receiver, LARGE if (sender, receiver) != (0, 1) else 0][(step + sender) % 4]
    generator = torch.Generator().manual_seed(100 * step + 10 * sender + receiver)
    return torch.randint(0, 2**60, (num_rows, 2), generator=generator)


def exchange_all(rank: int, machines: tuple[int, ...]) -> list[bool]:
    sockets = connect(machines)
    families = {number: peer.family for number, peer in sockets._peers.items()}
    assert families == {
        number: socket.AF_UNIX if machines[number] == machines[rank] else socket.AF_INET
        for number in range(NUM_MEMBERS)
        if number != rank
    }
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


@on_machines
def test_each_member_gets_what_the_others_send(machines):
    assert all(all(found) for found in run_in_processes(exchange_all, NUM_MEMBERS, machines))


def lose_one(rank: int, ends: bool, machines: tuple[int, ...]) -> tuple[str, object] | None:
    sockets = connect(machines, silence_limit_s=1.0)
    sockets.exchange_sized([b"here"] * NUM_MEMBERS)
    if rank == 1:
        if ends:
            del sockets
        # Longer than the limit of the others; what they find is not timed.
        dist.barrier()
        return None
    try:
        sockets.exchange_sized([b"again"] * NUM_MEMBERS)
    except LostWorkerError as error:
        found = (str(error), error.lost)
    # No other member leaves before all have found the one that is gone.
    dist.barrier()
    return found


@pytest.mark.parametrize(
    ("ends", "observed"), [(True, "its connection broke"), (False, "it is silent")], ids=["ends", "is silent"]
)
@on_machines
def test_a_member_that_is_gone_or_silent_is_named(ends, observed, machines):
    first, _, third = run_in_processes(lose_one, NUM_MEMBERS, ends, machines)

    for message, lost in (first, third):
        assert observed in message
        assert lost == (1, 0, 1)


def connect_beside_a_stranger(rank: int, shown: bytes, machines: tuple[int, ...]) -> bool:
    if rank == 0:
        # Before the others come, someone without a token is at the listener.
        token_connections._TOKEN_LIMIT_S = 1.0
        new_listener = token_connections._new_listener

        def listen_and_call(kind, **options):
            listener = new_listener(kind, **options)
            stranger = socket.socket(listener.family)
            stranger.connect(listener.getsockname())
            stranger.sendall(shown)
            strangers.append(stranger)
            return listener

        strangers = []
        token_connections._new_listener = listen_and_call
    answers = connect(machines).exchange_sized([bytes([rank])] * NUM_MEMBERS)
    return [answer[0] for answer in answers] == [0, 1, 2]


@pytest.mark.parametrize("shown", [bytes([2, 0, 0, 0]) + bytes(32), b""], ids=["another token", "no token"])
@on_machines
def test_a_stranger_without_the_token_is_refused(shown, machines):
    assert run_in_processes(connect_beside_a_stranger, NUM_MEMBERS, shown, machines) == [True] * NUM_MEMBERS
