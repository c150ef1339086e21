import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.planning.simulate.shared_cores import SharedCores, Wait, Work


def ends(num_cores, *threads, **delays):
    """Run threads, each a list of requests or of events as text, and return when each ended."""
    cores = SharedCores(num_cores, **delays)
    found = [0.0] * len(threads)

    def run(number, requests):
        for request in requests:
            if isinstance(request, str):
                cores.happen(request)
            else:
                yield request
        found[number] = cores.now_seconds

    for number, requests in enumerate(threads):
        cores.start(run(number, requests))
    cores.run()
    return found


@pytest.mark.parametrize(
    ("num_cores", "works", "expected"),
    [
        (1, [1.0], [1.0]),
        # Half a core each until the shorter one is through.
        (1, [1.0, 3.0], [2.0, 4.0]),
        # The first and the third share a core until the second is through with the other.
        (2, [2.0, 2.0, 2.0], [3.0, 2.0, 3.0]),
        # Half a core each until 2 s, when the third has 2 s left.
        (2, [1.0, 3.0, 3.0], [2.0, 3.0, 4.0]),
        (4, [1.0, 2.0], [1.0, 2.0]),
    ],
)
def test_threads_on_a_core_share_it_equally(num_cores, works, expected):
    assert ends(num_cores, *([Work(seconds)] for seconds in works)) == pytest.approx(expected)


def test_a_thread_that_wakes_stays_where_it_was_unless_a_core_rests():
    # The first goes on beside the third, and moves to the second core, which rests. There the second wakes at 2 s,
    # where it was, though the other core has as little to do; they share it until the third is through.
    found = ends(
        2,
        [Work(1.5), "third", Work(0.5), "second", Work(8.0)],
        [Work(1.0), Wait("second"), Work(2.0)],
        [Wait("third"), Work(2.0)],
    )

    assert found == pytest.approx([10.75, 4.75, 3.5])


def test_waiting_ends_with_the_event_and_not_before():
    assert ends(2, [Wait("row"), Work(1.0)], [Work(2.0), "row", Work(3.0)]) == pytest.approx([3.0, 5.0])


def test_an_event_of_the_past_is_not_waited_for():
    assert ends(2, [Work(2.0), Wait("row")], [Work(1.0), "row"]) == pytest.approx([2.0, 1.0])


def test_a_thread_that_waited_wakes_late_and_one_that_need_not_wait_goes_on_at_once():
    found = ends(2, [Wait("row"), Work(1.0)], [Work(2.0), "row", Work(3.0), Wait("row")], wake_seconds=0.25)

    assert found == pytest.approx([3.25, 5.0])


def test_a_core_takes_a_thread_of_another_only_after_a_rest():
    # The first and the third share a core; the second is through with the other at 1 s. Half a second later, when
    # both have done 0.75 s of their work, one of them moves.
    works = [[Work(2.0)], [Work(1.0)], [Work(2.0)]]

    assert ends(2, *works, balance_seconds=0.5) == pytest.approx([2.75, 1.0, 2.75])
    assert ends(2, *works) == pytest.approx([2.5, 1.0, 2.5])


def test_threads_that_wait_for_ever_are_an_error():
    with pytest.raises(ConfigurationError, match="wait for ever, for row"):
        ends(1, [Wait("row")])


def test_refuses_a_machine_without_cores():
    with pytest.raises(ConfigurationError, match="num_cores must be at least 1, got 0"):
        SharedCores(0)
