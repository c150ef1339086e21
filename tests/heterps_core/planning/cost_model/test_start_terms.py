"""The fewest replicas that are ready by a limit, against trying each count."""

import numpy as np
import pytest

from heterps_core.planning.cost_model.start_terms import StartTerms


@pytest.mark.parametrize("seed", range(5))
def test_the_fewest_replicas_are_those_that_trying_each_count_finds(seed):
    random = np.random.default_rng(seed)
    terms = StartTerms(
        fixed_seconds=random.uniform(0, 2, 40),
        shared_seconds=random.choice([0.0, 3.0, 50.0], 40),
        shared_on_disk=random.uniform(50, 90, 40),
        memory_replicas=random.integers(1, 12, 40).astype(float),
    )
    counts = np.arange(1.0, 200.0)
    starts = np.stack([terms.seconds(np.full(40, count)) for count in counts])  # (counts, 40)

    # Limits that some counts meet exactly, and those a little below.
    limits = starts[random.integers(0, 30, 10), random.integers(0, 40, 10)]
    for limit in [*limits, *np.nextafter(limits, 0.0)]:
        kept = starts <= limit
        expected = np.where(kept.any(axis=0), counts[kept.argmax(axis=0)], np.inf)
        found = terms.least_replicas(float(limit))
        near = np.where(found > 199, np.inf, found)
        assert near.tolist() == expected.tolist()


def test_a_stage_of_two_replicas_on_disk_is_a_hand_worked_example():
    """40 s until it is up; 100 s of loading in memory, from 4 replicas on, and 300 s on disk before."""
    terms = StartTerms(
        fixed_seconds=np.array([40.0]),
        shared_seconds=np.array([100.0]),
        shared_on_disk=np.array([300.0]),
        memory_replicas=np.array([4.0]),
    )

    assert [terms.seconds(np.array([count])).item() for count in (1.0, 2.0, 4.0)] == [340, 190, 65]
    assert [terms.least_replicas(limit).item() for limit in (200.0, 150.0, 60.0, 39.0)] == [2, 3, 5, np.inf]
