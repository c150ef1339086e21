import numpy as np
import pytest

from heterps_core.planning.simulate.row_routes import Transfer, _routes_between
from heterps_core.training.pipeline.stage_exchange import _routes_to_neighbour

SHAPES = [(12, 3, 2), (10, 1, 4), (512, 31, 2), (7, 5, 3), (3, 5, 4), (4, 9, 1), (1, 6, 6)]


@pytest.mark.parametrize(("num_rows", "num_replicas", "num_peers"), SHAPES)
def test_messages_are_those_that_the_replicas_exchange(num_rows, num_replicas, num_peers):
    expected = [
        (replica, route.peer_replica, route.stop - route.first)
        for replica in range(num_replicas)
        for route in _routes_to_neighbour(
            num_rows, shares=(1,) * num_replicas, replica=replica, peer_shares=(1,) * num_peers
        )
    ]

    routes = _routes_between(num_rows, num_replicas=num_replicas, num_peer_replicas=num_peers)

    found = zip(routes.replicas, routes.peer_replicas, routes.num_rows, strict=True)
    assert [tuple(int(value) for value in message) for message in found] == expected


def transfer(num_rows, num_senders, num_receivers, *, send=1.0, receive=1.0):
    return Transfer(
        _routes_between(num_rows, num_replicas=num_senders, num_peer_replicas=num_receivers),
        num_senders=num_senders,
        num_receivers=num_receivers,
        send_seconds_per_row=send,
        receive_seconds_per_row=receive,
    )


def test_a_message_takes_the_slower_lane():
    for send, receive in ((1.0, 3.0), (3.0, 1.0)):
        found = transfer(2, 1, 1, send=send, receive=receive).received(np.array([10.0]), np.array([0.0]))
        assert found == pytest.approx([16.0])


def test_messages_queue_on_the_lane_that_they_share():
    # Two senders of two rows each, both at 0 s, to one receiver: 2 s, then 2 s more.
    assert transfer(4, 2, 1).received(np.zeros(2), np.zeros(1)) == pytest.approx([4.0])
    # One sender to two receivers: its second message leaves after the first.
    assert transfer(4, 1, 2).received(np.zeros(1), np.zeros(2)) == pytest.approx([2.0, 4.0])


def test_a_receiver_waits_for_the_last_of_its_senders():
    both = transfer(4, 2, 1)

    assert both.received(np.array([0.0, 7.0]), np.zeros(1)) == pytest.approx([9.0])
    # The first sender comes first, and holds the second back.
    assert both.received(np.array([7.0, 0.0]), np.zeros(1)) == pytest.approx([11.0])
    assert both.produced(np.array([7.0, 3.0])) == pytest.approx([7.0])


def test_a_replica_without_rows_waits_for_nothing():
    two_of_three = transfer(2, 1, 3)

    assert two_of_three.received(np.array([5.0]), np.zeros(3)) == pytest.approx([0.0, 6.0, 7.0])
    assert two_of_three.produced(np.array([5.0])).tolist() == [-np.inf, 5.0, 5.0]
