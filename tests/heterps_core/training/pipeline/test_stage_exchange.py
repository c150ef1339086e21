"""Messages between stages, checked by marking every row."""

import itertools

import pytest

from heterps_core.training.pipeline.stage_exchange import _routes_to_neighbour, replica_slice

SHAPES = [
    (num_rows, mine, theirs)
    for num_rows, mine, theirs in itertools.product([0, 1, 5, 12, 64], [1, 2, 3, 5], [1, 2, 4])
]


@pytest.mark.parametrize(("num_rows", "num_replicas"), [(10, 3), (2, 4), (0, 2), (7, 7)])
def test_slices_cover_every_row_once(num_rows, num_replicas):
    slices = [replica_slice(num_rows, num_replicas, replica) for replica in range(num_replicas)]

    rows = [row for part in slices for row in range(part.first, part.stop)]
    assert rows == list(range(num_rows))


@pytest.mark.parametrize(("num_rows", "num_replicas", "num_peers"), SHAPES)
def test_every_row_travels_once_and_to_the_replica_that_works_on_it(num_rows, num_replicas, num_peers):
    arrived = {}
    for replica in range(num_replicas):
        mine = replica_slice(num_rows, num_replicas, replica)
        for route in _routes_to_neighbour(
            num_rows, num_replicas=num_replicas, replica=replica, num_peer_replicas=num_peers
        ):
            for row in range(mine.first + route.first, mine.first + route.stop):
                assert row not in arrived
                arrived[row] = route.peer_replica

    for peer in range(num_peers):
        theirs = replica_slice(num_rows, num_peers, peer)
        assert [row for row, to in sorted(arrived.items()) if to == peer] == list(
            range(theirs.first, theirs.stop)
        )


@pytest.mark.parametrize(("num_rows", "num_replicas", "num_peers"), SHAPES)
def test_sender_and_receiver_agree_on_every_message(num_rows, num_replicas, num_peers):
    def messages(senders, receivers):
        return {
            (replica, route.peer_replica, route.stop - route.first)
            for replica in range(senders)
            for route in _routes_to_neighbour(
                num_rows, num_replicas=senders, replica=replica, num_peer_replicas=receivers
            )
        }

    there = messages(num_replicas, num_peers)
    back = {(replica, peer, size) for peer, replica, size in messages(num_peers, num_replicas)}
    assert there == back
