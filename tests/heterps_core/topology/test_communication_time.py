import numpy as np
import pytest

from heterps_core.topology.communication_time import (
    LinkLatencies,
    all_gather_seconds,
    message_seconds,
    ring_all_reduce_seconds,
    tree_all_reduce_seconds,
)

# Round numbers, so that each term can be told from the sum.
FIXED = LinkLatencies(
    ring_base_seconds=1000.0,
    tree_base_seconds=2000.0,
    intra_machine_seconds=1.0,
    inter_machine_seconds=10.0,
    switch_seconds=100.0,
)
FAST = LinkLatencies(
    ring_base_seconds=0.0,
    tree_base_seconds=0.0,
    intra_machine_seconds=2.0,
    inter_machine_seconds=5.0,
    switch_seconds=0.0,
)


def test_ring_by_hand():
    # 8 ranks on 2 machines, 3 switches between them: 1000 + 2*6*1 + 2*1*(10+300) + 2*7/8*800/100.
    seconds = ring_all_reduce_seconds(
        800, num_ranks=8, num_machines=2, bandwidth_bytes_per_s=100, latencies=FIXED, num_switches=3
    )

    assert seconds == pytest.approx(1000 + 12 + 620 + 14)


def test_tree_by_hand():
    # 8 ranks on 4 machines: 2000 + 2*(2-1)*1 + 2*10 + 2*800/100.
    seconds = tree_all_reduce_seconds(
        800, num_ranks=8, num_machines=4, bandwidth_bytes_per_s=100, latencies=FIXED
    )

    assert seconds == pytest.approx(2000 + 2 + 20 + 16)


def test_all_gather_by_hand():
    # 4 ranks on 2 machines: 1000 + 2*1 + 1*(10+100) + 3/4*800/100.
    seconds = all_gather_seconds(
        800, num_ranks=4, num_machines=2, bandwidth_bytes_per_s=100, latencies=FIXED, num_switches=1
    )

    assert seconds == pytest.approx(1000 + 2 + 110 + 6)


@pytest.mark.parametrize(("crosses_machines", "hop_seconds"), [(False, 1), (True, 10 + 2 * 100)])
def test_message_by_hand(crosses_machines, hop_seconds):
    seconds = message_seconds(
        800, crosses_machines=crosses_machines, bandwidth_bytes_per_s=100, latencies=FIXED, num_switches=2
    )

    assert seconds == pytest.approx(1000 + hop_seconds + 8)


@pytest.mark.parametrize("collective", [ring_all_reduce_seconds, tree_all_reduce_seconds, all_gather_seconds])
def test_one_rank_has_nobody_to_talk_to(collective):
    assert collective(800, num_ranks=1, num_machines=1, bandwidth_bytes_per_s=100, latencies=FIXED) == 0


def test_arrays_give_what_numbers_give_one_by_one():
    num_bytes, num_ranks = np.array([0, 100, 1000]), np.array([1, 4, 6])

    found = ring_all_reduce_seconds(
        num_bytes, num_ranks=num_ranks, num_machines=1, bandwidth_bytes_per_s=10.0, latencies=FIXED
    )

    assert found.tolist() == pytest.approx(
        [
            float(
                ring_all_reduce_seconds(
                    b, num_ranks=n, num_machines=1, bandwidth_bytes_per_s=10.0, latencies=FIXED
                )
            )
            for b, n in zip(num_bytes.tolist(), num_ranks.tolist(), strict=True)
        ]
    )


def ring_step_by_step(num_bytes, machine_of, *, num_rounds, bandwidth_bytes_per_s):
    """Run a ring: in each round every rank passes on the chunk that it got in the round before."""
    num_ranks = len(machine_of)
    seconds_of_chunk = num_bytes / num_ranks / bandwidth_bytes_per_s
    has_chunk_at = [0.0] * num_ranks
    sender_free_at = [0.0] * num_ranks
    for _ in range(num_rounds):
        arrives_at = [0.0] * num_ranks
        for rank in range(num_ranks):
            peer = (rank + 1) % num_ranks
            same = machine_of[rank] == machine_of[peer]
            hop_seconds = FAST.intra_machine_seconds if same else FAST.inter_machine_seconds
            sent_at = max(has_chunk_at[rank], sender_free_at[rank]) + seconds_of_chunk
            sender_free_at[rank] = sent_at
            arrives_at[peer] = sent_at + hop_seconds
        has_chunk_at = arrives_at
    return max(has_chunk_at)


@pytest.mark.parametrize("machine_of", [[0] * 5, [0, 1, 2, 3], [0, 0], [0, 0, 1, 1], [0, 0, 0, 1, 1, 2]])
@pytest.mark.parametrize(("collective", "halves"), [(ring_all_reduce_seconds, 2), (all_gather_seconds, 1)])
def test_a_ring_run_step_by_step(machine_of, collective, halves):
    n, m = len(machine_of), len(set(machine_of))
    run = ring_step_by_step(600.0, machine_of, num_rounds=halves * (n - 1), bandwidth_bytes_per_s=10.0)

    formula = float(
        collective(600.0, num_ranks=n, num_machines=m, bandwidth_bytes_per_s=10.0, latencies=FAST)
    )

    if m in (1, n):
        # All hops alike. Among n machines of one rank each the formula still charges m - 1 of them.
        assert formula == pytest.approx(run)
    else:
        spare = halves * (FAST.inter_machine_seconds - FAST.intra_machine_seconds)
        assert formula <= run <= formula + spare + 1e-9
