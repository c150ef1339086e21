"""Messages between stages, checked by marking every row."""

import itertools

import pytest

from heterps_core.training.pipeline.stage_exchange import _routes_to_neighbour, replica_slice, shared_slice

SHARES = [(1,), (1, 1), (3, 1), (1, 1, 1), (5, 1, 30), (1,) * 5]
SHAPES = list(itertools.product([0, 1, 5, 12, 64], SHARES, [(1,), (1, 2), (7, 1, 1, 3)]))


@pytest.mark.parametrize(("num_rows", "num_replicas"), [(10, 3), (2, 4), (0, 2), (7, 7)])
def test_slices_cover_every_row_once(num_rows, num_replicas):
    slices = [replica_slice(num_rows, num_replicas, replica) for replica in range(num_replicas)]

    rows = [row for part in slices for row in range(part.first, part.stop)]
    assert rows == list(range(num_rows))


@pytest.mark.parametrize("num_rows", [0, 1, 7, 64, 4096])
@pytest.mark.parametrize("shares", [(3, 1), (1, 5, 2), (1_000, 1)])
def test_slices_follow_shares_to_less_than_a_row(num_rows, shares):
    slices = [shared_slice(num_rows, shares, replica) for replica in range(len(shares))]

    assert [row for part in slices for row in range(part.first, part.stop)] == list(range(num_rows))
    for part, share in zip(slices, shares, strict=True):
        assert abs(part.num_rows - num_rows * share / sum(shares)) < 1


def test_equal_shares_of_any_size_are_slices_as_before():
    for num_rows, replica in itertools.product([0, 5, 12, 4096], range(3)):
        assert shared_slice(num_rows, (7, 7, 7), replica) == replica_slice(num_rows, 3, replica)


@pytest.mark.parametrize(("num_rows", "shares", "peer_shares"), SHAPES)
def test_every_row_travels_once_and_to_the_replica_that_works_on_it(num_rows, shares, peer_shares):
    arrived = {}
    for replica in range(len(shares)):
        mine = shared_slice(num_rows, shares, replica)
        for route in _routes_to_neighbour(num_rows, shares=shares, replica=replica, peer_shares=peer_shares):
            for row in range(mine.first + route.first, mine.first + route.stop):
                assert row not in arrived
                arrived[row] = route.peer_replica

    for peer in range(len(peer_shares)):
        theirs = shared_slice(num_rows, peer_shares, peer)
        assert [row for row, to in sorted(arrived.items()) if to == peer] == list(
            range(theirs.first, theirs.stop)
        )


@pytest.mark.parametrize(("num_rows", "shares", "peer_shares"), SHAPES)
def test_sender_and_receiver_agree_on_every_message(num_rows, shares, peer_shares):
    def messages(senders, receivers):
        return {
            (replica, route.peer_replica, route.stop - route.first)
            for replica in range(len(senders))
            for route in _routes_to_neighbour(
                num_rows, shares=senders, replica=replica, peer_shares=receivers
            )
        }

    there = messages(shares, peer_shares)
    back = {(replica, peer, size) for peer, replica, size in messages(peer_shares, shares)}
    assert there == back
