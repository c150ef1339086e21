from dataclasses import replace

import pytest

from heterps_core.device_types import DEVICE_TYPES
from heterps_core.errors import ConfigurationError
from heterps_core.models.model_graph import LayerKind
from heterps_core.profiling.analytic_profile import _layer_work, _slowdowns, estimate_profile
from tests.heterps_core.profiling.builders import (
    DENSE,
    EMBEDDING,
    GRAPH,
    SPEED,
    make_profile,
    make_timing,
)


def test_the_roofline_of_a_dense_layer_is_the_longer_of_computing_and_moving():
    forward = _layer_work(DENSE, batch_size=100)["forward"]

    # 100 * 500 operations at 1e6/s take 0.05 s; 100 * (60 + 4) + 1000 bytes at 1e5/s take 0.074 s.
    assert forward.limit_seconds(SPEED) == pytest.approx(0.074)
    # At a tenth of the batch: 0.005 s against 0.0164 s, and a hundredth of the memory's share at 1e7 bytes/s.
    fast_memory = replace(SPEED, memory_bandwidth_bytes_per_s=1e7)
    assert forward.limit_seconds(fast_memory) == pytest.approx(0.05)


def test_the_backward_pass_of_a_dense_layer_multiplies_twice():
    work = _layer_work(DENSE, batch_size=100)

    assert work["backward"].flops == 2 * work["forward"].flops == 100_000
    assert work["update"].num_bytes == 7 * 1_000


def test_the_work_of_an_embedding_does_not_depend_on_the_size_of_its_table():
    bigger = replace(EMBEDDING, parameter_bytes=10**12)

    assert _layer_work(bigger, batch_size=100) == _layer_work(EMBEDDING, batch_size=100)


def test_the_slowdown_of_a_kind_is_measured_time_over_roofline_without_launches():
    # Forward: 1 s measured, one launch of 0.001 s, roofline 0.074 s.
    found = _slowdowns(GRAPH, make_profile())

    assert found[LayerKind.FULLY_CONNECTED, "forward"] == pytest.approx((1.0 - 0.001) / 0.074)


def test_no_kind_is_estimated_faster_than_the_roofline():
    in_the_cache = make_profile(timings=(make_timing(EMBEDDING, 1, 1, 1), make_timing(DENSE, 1, 1, 1)))

    assert set(_slowdowns(GRAPH, in_the_cache).values()) == {1.0}


def test_a_machine_of_unknown_rates_calibrates_nothing():
    with pytest.raises(ConfigurationError, match="whose rates are known, but those of local-cpu are not"):
        estimate_profile(GRAPH, replace(make_profile(), machine_speed=None), DEVICE_TYPES["gpu-t4"])


def test_an_estimate_for_the_measured_speed_gives_the_measured_times_back():
    # Slow enough that no kind reaches its roofline, beyond which times are not given back.
    measured = make_profile(
        timings=(make_timing(EMBEDDING, 600, 400, 1_000), make_timing(DENSE, 1_000, 2_000, 400))
    )
    same_device = replace(
        DEVICE_TYPES["cpu-c5"],
        peak_fp32_flops_per_s=SPEED.flops_per_s,
        memory_bandwidth_bytes_per_s=SPEED.memory_bandwidth_bytes_per_s,
        kernel_launch_seconds=SPEED.kernel_launch_seconds,
    )

    estimate = estimate_profile(GRAPH, measured, same_device)

    for found, timing in zip(estimate.timings, measured.timings, strict=True):
        assert found.compute_ms(update_share=1.0) == pytest.approx(timing.compute_ms(update_share=1.0))


def test_what_a_core_computes_beside_moving_rows_takes_as_long_on_one_with_less_bandwidth():
    core = replace(DEVICE_TYPES["cpu-c5"], memory_bandwidth_bytes_per_s=5e4, kernel_launch_seconds=0.002)

    rows = estimate_profile(GRAPH, make_profile(), core).timings[0]

    # 12,000 bytes take 0.24 s for 0.12, and five launches 0.01 for 0.005.
    assert rows.forward.median_ms == pytest.approx(300 - 125 + 250)
    assert rows.backward.median_ms == pytest.approx(200)
    # 16,000 bytes take 0.32 s for 0.16, and 21 launches 0.042 for 0.021.
    assert rows.update.median_ms == pytest.approx(500 - 181 + 362)


@pytest.mark.parametrize(("num_bytes", "is_cached"), [(20_000, True), (40_000, False)])
def test_activations_that_caches_hold_pass_a_cpu_as_fast_as_the_measured_one(num_bytes, is_cached):
    sizes = {"input_bytes_per_sample": num_bytes, "output_bytes_per_sample": num_bytes}
    relu = replace(
        DENSE, kind=LayerKind.ELEMENTWISE, parameter_bytes=0, forward_flops_per_sample=0.0, **sizes
    )
    graph = replace(GRAPH, layers=(EMBEDDING, relu))
    core = replace(
        DEVICE_TYPES["cpu-c5"],
        memory_bandwidth_bytes_per_s=SPEED.memory_bandwidth_bytes_per_s / 10,
        kernel_launch_seconds=SPEED.kernel_launch_seconds,
    )
    timings = (make_timing(EMBEDDING, 600, 400, 1_000), make_timing(relu, 100_000, 200_000, 0))
    measured = make_profile(graph=graph, timings=timings)

    found = estimate_profile(graph, measured, core).timings[1]

    # 100 samples of 20 kB are 2 MB. A tenth of the bandwidth adds nine times the time of the bytes.
    moving_ms = 0.0 if is_cached else 9 * 1e3 * 2 * 100 * num_bytes / SPEED.memory_bandwidth_bytes_per_s
    assert found.forward.median_ms == pytest.approx(100_000 + moving_ms)


def test_a_card_misses_its_roofline_as_the_core_that_was_measured():
    card = replace(DEVICE_TYPES["gpu-t4"], memory_bandwidth_bytes_per_s=2e5, kernel_launch_seconds=0.001)

    rows = estimate_profile(GRAPH, make_profile(), card).timings[0]

    assert rows.forward.median_ms == pytest.approx(5 + (300 - 5) / 2)
    assert rows.backward.median_ms == 0.0


def test_a_layer_whose_work_was_not_counted_gains_what_the_slower_rate_gains():
    graph = replace(
        GRAPH, layers=(EMBEDDING, replace(DENSE, forward_flops_per_sample=0.0, uncounted=("my::op",)))
    )
    card = replace(
        DEVICE_TYPES["gpu-t4"],
        peak_fp32_flops_per_s=100 * SPEED.flops_per_s,
        memory_bandwidth_bytes_per_s=10 * SPEED.memory_bandwidth_bytes_per_s,
        kernel_launch_seconds=0.0,
    )

    block = estimate_profile(graph, make_profile(graph=graph), card).timings[1]

    # A tenth of what was measured, less one launch of 1 ms forward and three backward.
    assert block.forward.median_ms == pytest.approx((1_000 - 1) / 10)
    assert block.backward.median_ms == pytest.approx((2_000 - 3) / 10)
    assert block.source.startswith("my::op not counted")
    assert "fc (my::op)" in graph.uncounted_text
    assert GRAPH.uncounted_text == ""


@pytest.mark.parametrize("name", sorted(DEVICE_TYPES))
def test_every_estimate_is_marked_and_says_from_what(name):
    estimate = estimate_profile(GRAPH, make_profile(), DEVICE_TYPES[name])

    assert all(timing.is_estimated for timing in (*estimate.timings, *estimate.half_batch_timings))
    assert name in estimate.timings[0].source
    assert "estimated" in estimate.hardware
    assert estimate.sum_over_step is None
    assert 0 <= estimate.compute_parallel_fraction(batch_size=100) <= 1


@pytest.mark.parametrize(
    ("field", "factor"),
    [
        ("peak_fp32_flops_per_s", 2.0),
        ("memory_bandwidth_bytes_per_s", 2.0),
        ("kernel_launch_seconds", 0.5),
    ],
)
def test_a_device_that_is_better_in_one_figure_is_never_slower(field, factor):
    device_type = DEVICE_TYPES["gpu-t4"]
    better = replace(device_type, **{field: factor * getattr(device_type, field)})

    times, better_times = (
        [
            timing.compute_ms(update_share=1.0)
            for timing in estimate_profile(GRAPH, make_profile(), kind).timings
        ]
        for kind in (device_type, better)
    )

    assert all(found <= time for found, time in zip(better_times, times, strict=True))


def test_replicas_all_reduce_over_the_network_and_not_at_loopback_speed():
    on_cores = estimate_profile(GRAPH, make_profile(), DEVICE_TYPES["cpu-c5"])
    on_cards = estimate_profile(GRAPH, make_profile(), DEVICE_TYPES["gpu-t4"])

    assert on_cores.all_reduce_link.bandwidth_bytes_per_s == 0.97 * 62.5e6  # of 12 Gbit/s for 24 cores
    assert on_cards.all_reduce_link.bandwidth_bytes_per_s == 0.97 * 625e6  # of 5 Gbit/s of g4dn.xlarge


def test_refuses_to_calibrate_on_an_estimate():
    estimate = estimate_profile(GRAPH, make_profile(), DEVICE_TYPES["gpu-t4"])

    with pytest.raises(ConfigurationError, match="profile the model on this machine first"):
        estimate_profile(GRAPH, estimate, DEVICE_TYPES["cpu-c5"])


@pytest.mark.parametrize(
    ("name", "times_float32"), [("cpu-c7i", 16.0), ("gpu-l4", 121 / 30.3), ("cpu-c5", 1.0), ("gpu-t4", 1.0)]
)
def test_bfloat16_is_estimated_by_the_units_of_the_hardware_for_it(name, times_float32):
    device_type = DEVICE_TYPES[name]

    whole, half = (
        estimate_profile(GRAPH, replace(make_profile(), precision=precision), device_type).machine_speed
        for precision in ("float32", "bfloat16")
    )

    assert half.flops_per_s == pytest.approx(times_float32 * whole.flops_per_s)
