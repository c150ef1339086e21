import json
from dataclasses import replace

import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.profiling.layer_profile import LayerProfile, RowReading, _parallel_fraction
from heterps_core.profiling.timing import Timing
from tests.heterps_core.profiling.builders import DENSE, EMBEDDING, make_profile, make_timing


@pytest.mark.parametrize(
    ("shared_seconds", "fraction"),
    [(5.0, 1.0), (10.0, 0.0), (8.0, 0.4), (12.0, 0.0), (4.0, 1.0)],  # 10 (1 - a + a / 2); beyond that cut off
)
def test_parallel_fraction_follows_from_the_time_of_two_replicas(shared_seconds, fraction):
    assert _parallel_fraction(10.0, shared_seconds, num_replicas=2) == pytest.approx(fraction)


def test_nothing_to_do_is_wholly_parallel():
    assert _parallel_fraction(0.0, 0.0, num_replicas=2) == 1.0


def test_alpha_is_that_of_all_layers_with_the_update_of_dense_layers_undivided():
    # By hand: 4400 ms for 100 samples, 2420 ms for 50; rho = 0.55, alpha = 0.45 / 0.5.
    assert make_profile().compute_parallel_fraction(batch_size=100) == pytest.approx(0.9)


def test_alpha_grows_where_one_update_serves_several_micro_batches():
    # A quarter of the dense update: 4100 and 2120 ms.
    found = make_profile().compute_parallel_fraction(batch_size=400)

    assert found == pytest.approx((1 - 2_120 / 4_100) * 2)


def test_beta_counts_what_belongs_to_samples_as_parallel():
    # 3000 and 2000 bytes of rows and 2 * 1000 of gradients over the same link.
    found = make_profile().communication_parallel_fraction(batch_size=100)

    assert found == pytest.approx((1 - 4_000 / 5_000) * 2)


def test_beta_grows_with_the_boundary_of_a_stage():
    # 60 bytes a sample on top, in either direction: 11000 and 7000 bytes.
    found = make_profile().communication_parallel_fraction(batch_size=100, boundary_bytes_per_sample=60)

    assert found == pytest.approx((1 - 7_000 / 11_000) * 2)


def test_reading_is_charged_for_batches_for_rows_and_for_those_rows_that_are_not_in_memory():
    reading = RowReading(batch_ms=8.0, row_ms=0.4, decoded_row_ms=1.0)

    # A quarter of what a batch begins with, 40 ms for 100 rows, and 30 ms for 30 of them.
    assert reading.seconds(100, num_batches=0.25, decoded_share=0.3) == pytest.approx(0.072)


def test_alpha_counts_the_rows_that_the_computing_core_reads_as_divided_and_the_start_of_a_batch_as_not():
    profile = replace(make_profile(), reading=RowReading(batch_ms=100.0, row_ms=1.0, decoded_row_ms=4.0))

    # 4400 and 2420 ms of the layers; 100 + 300 and 100 + 150 ms with half of the rows decoded.
    found = profile.compute_parallel_fraction(batch_size=100, decoded_share=0.5)
    assert found == pytest.approx((1 - 2_670 / 4_800) * 2)
    assert profile.compute_parallel_fraction(batch_size=100) == pytest.approx(0.9)


def test_scaled_times_keep_their_relative_spread():
    phase = Timing(median_ms=4.0, low_ms=3.0, high_ms=6.0, num_repeats=9)
    timing = replace(make_timing(DENSE, 0.0, 0.0, 0.0), forward=phase)

    assert timing.scaled(0.5).forward == Timing(median_ms=2.0, low_ms=1.5, high_ms=3.0, num_repeats=9)


def test_only_a_profile_of_a_busy_machine_says_so():
    idle, busy = (replace(make_profile(), clock_over_processor=factor) for factor in (1.1, 4.2))

    assert (idle.was_busy, idle.busy_text) == (False, "")
    assert busy.busy_text.endswith("4.2 s for 1 s of work")


def test_a_dense_update_is_charged_once_a_training_batch():
    profile = make_profile()

    assert profile.compute_seconds(1, batch_size=400) == pytest.approx(3.1)
    # Over all of a batch of 50, which is half a profiling batch, it is whole again: (1 + 2 + 0.8) / 2 = 1.5 + 0.4.
    assert profile.compute_seconds(1, batch_size=50) == pytest.approx(3.8)
    assert profile.compute_seconds(0, batch_size=400) == pytest.approx(1.0)


@pytest.mark.parametrize("profile", [make_profile(), replace(make_profile(), machine_speed=None)])
def test_a_profile_survives_json(profile):
    document = json.loads(json.dumps(profile.to_json()))

    assert LayerProfile.from_json(document) == profile
    assert document["compute_parallel_fraction"] == pytest.approx(0.9)


@pytest.mark.parametrize("spoiled", [{"schema_version": 0}, {"timings": [{}]}, {"boundary_link": None}])
def test_refuses_json_of_another_form(spoiled):
    with pytest.raises(ConfigurationError, match="measure it again"):
        LayerProfile.from_json({**make_profile().to_json(), **spoiled})


def test_one_estimated_layer_makes_the_profile_estimated():
    profile = make_profile()
    estimated = replace(profile.timings[1], is_estimated=True)

    assert not profile.is_estimated
    assert replace(profile, timings=(profile.timings[0], estimated)).is_estimated


def test_refuses_two_sizes_with_different_layers():
    with pytest.raises(ConfigurationError, match="same layers at both batch sizes"):
        make_profile(
            timings=(make_timing(EMBEDDING, 1, 1, 1), make_timing(DENSE, 1, 1, 1)),
            half_batch_timings=(make_timing(DENSE, 1, 1, 1),),
        )
