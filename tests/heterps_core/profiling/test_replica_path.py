"""The law of an exchange of rows: fitted to drawn times, and measured on this machine."""

import numpy as np
import pytest

from heterps_core.profiling import measuring_process
from heterps_core.profiling.layer_profile import LayerProfile
from heterps_core.profiling.measuring_process import measure_replica_path
from heterps_core.profiling.replica_path import PathSample, ReplicaPath, fitted_path
from tests.heterps_core.profiling import few_replicas
from tests.heterps_core.profiling.builders import make_profile


def sample(num_replicas, num_tables, num_bytes, law, *, factor=1.0):
    message, peer, table, byte = law
    # Requests of 8,192 samples take two messages, divided among the replicas.
    exchange = message * (2 + 2 / num_replicas) + peer * (2 * (num_replicas - 1) + 2)
    exchange += table * num_tables + byte * num_bytes
    return PathSample(8192, num_replicas, num_tables, num_bytes, 1e-3, factor * (1e-3 + exchange))


def terms(path):
    return path.message_seconds, path.peer_seconds, path.table_seconds, path.byte_seconds


SIZES = [(k, t, num_bytes / k) for k in (2, 4, 8) for t, num_bytes in ((1, 1.7e6), (1, 1.4e7), (2, 3.4e6))]


@pytest.mark.parametrize("law", [(2e-4, 5e-5, 4e-4, 6e-10), (0.0, 5e-5, 4e-4, 6e-10), (2e-4, 0.0, 0.0, 0.0)])
def test_the_terms_of_times_without_noise_are_found(law):
    path = fitted_path([sample(*size, law) for size in SIZES], measured_at="")

    assert terms(path) == pytest.approx(law, abs=1e-12)
    assert path.relative_error < 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_a_tenth_makes_no_term_negative_and_shows_in_the_error(seed):
    noise = np.random.default_rng(seed).uniform(0.9, 1.1, len(SIZES))
    law = (2e-4, 5e-5, 4e-4, 6e-10)
    samples = [sample(*size, law, factor=factor) for size, factor in zip(SIZES, noise, strict=True)]

    path = fitted_path(samples, measured_at="")

    assert min(terms(path)) >= 0
    assert path.byte_seconds == pytest.approx(law[3], rel=0.4)
    misses = [
        abs(sample(*size, terms(path)).seconds / measured.seconds - 1)
        for size, measured in zip(SIZES, samples, strict=True)
    ]
    assert path.relative_error == pytest.approx(max(misses))
    assert 0.01 < path.relative_error < 0.15


def test_replicas_that_cost_nothing_beside_their_samples_have_no_terms():
    assert terms(fitted_path([PathSample(4096, k, 1, 1e6, 1e-3, 1e-3) for k in (2, 4)], measured_at="")) == (
        0,
        0,
        0,
        0,
    )


def test_a_profile_of_an_earlier_version_takes_a_message_to_each_peer_for_one_between_two():
    profile = make_profile()
    kept = profile.to_json()
    del kept["measured_replica_path"]

    path = LayerProfile.from_json(kept).replica_path

    assert terms(path) == (0.0, profile.exchange_link.latency_seconds, 0.0, 0.0)
    assert path.relative_error == 1.0


@pytest.mark.slow
def test_an_exchange_of_rows_among_few_replicas_takes_time():
    program = few_replicas.__name__
    path = ReplicaPath.from_json(measuring_process._measured(program, None, what="a law", way_out="none"))

    assert min(terms(path)) >= 0
    assert sum(terms(path)) > 0


@pytest.mark.weekly
def test_this_machine_takes_time_for_an_exchange_of_rows():
    path = measure_replica_path()

    assert ReplicaPath.from_json(path.to_json()) == path
    # On a busy machine a single term may drown in noise, but not all.
    assert min(terms(path)) >= 0
    step_seconds = (
        2 * (path.message_seconds + 15 * path.peer_seconds) + path.table_seconds + 1e6 * path.byte_seconds
    )
    assert 1e-4 < step_seconds < 0.1
