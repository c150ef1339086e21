"""Estimates from a real V100 profile of AlexNet, and a formula worked by hand."""

from dataclasses import replace

import pytest

from heterps_core.device_types import DEVICE_TYPES
from heterps_core.errors import ConfigurationError
from heterps_core.profiling.imported.pipedream import read_pipedream
from heterps_core.profiling.imported.rescaling import estimate_each_layer, rescaled
from heterps_core.profiling.profiles.analytic_profile import Work
from heterps_core.profiling.profiles.layer_profile import MachineSpeed
from heterps_core.profiling.timing import Timing
from tests.paths import TESTS

ALEXNET = TESTS / "golden" / "pipedream" / "alexnet.graph.txt"
V100 = DEVICE_TYPES["gpu-v100"]

SLOW = MachineSpeed(flops_per_s=100.0, memory_bandwidth_bytes_per_s=50.0, kernel_launch_seconds=0.001)
FAST = MachineSpeed(flops_per_s=400.0, memory_bandwidth_bytes_per_s=100.0, kernel_launch_seconds=0.0005)


@pytest.fixture(scope="module")
def alexnet():
    return read_pipedream(ALEXNET, V100, batch_size=None)


def milliseconds(profile):
    return [
        phase.median_ms
        for timing in profile.timings
        for phase in (timing.forward, timing.backward, timing.update)
    ]


@pytest.mark.parametrize(
    ("time_ms", "num_bytes", "expected_ms"),
    [
        # 2 launches of 1 ms become 2 of 0.5 ms; 100 operations are four times as fast.
        (12.0, 10.0, 1.0 + 10.0 / 4),
        # 200 bytes take 4 s there and 2 s here: half.
        (12.0, 200.0, 1.0 + 10.0 / 2),
        # Faster than its launches: all of it is launches. Nothing at all stays nothing.
        (1.0, 10.0, 0.5),
        (0.0, 10.0, 0.0),
        # Faster than the 1,000 ms that 100 operations should take at the peak: that is kept.
        (502.0, 10.0, 1.0 + 500.0 / 4),
    ],
)
def test_launches_scale_like_launches_and_the_rest_like_the_roofline(time_ms, num_bytes, expected_ms):
    work = Work(flops=100.0, num_bytes=num_bytes, num_operations=2)

    found = rescaled(Timing.estimated(time_ms), work, SLOW, new_work=work, new_speed=FAST)

    assert found.median_ms == pytest.approx(expected_ms)


def test_work_without_a_limit_keeps_its_time():
    nothing = Work(flops=0.0, num_bytes=0.0, num_operations=0)

    assert rescaled(Timing.estimated(3.0), nothing, SLOW, new_work=nothing, new_speed=FAST).median_ms == 3.0


def test_the_measured_device_type_is_given_back(alexnet):
    measured = alexnet.profiles["gpu-v100"]

    estimate = estimate_each_layer(alexnet.graph, measured, V100)

    assert milliseconds(estimate) == pytest.approx(milliseconds(measured))
    assert estimate.is_estimated
    assert not measured.is_estimated


def test_products_scale_with_the_peak(alexnet):
    estimate = estimate_each_layer(alexnet.graph, alexnet.profiles["gpu-v100"], DEVICE_TYPES["gpu-t4"])

    # The first convolution is bound by its products: 15.7 TFLOPS and 8.1 TFLOPS, launches of 5 microseconds.
    assert estimate.timings[0].forward.median_ms == pytest.approx(0.005 + (22.316 - 0.005) * 15.7 / 8.1)
    assert estimate.graph_fingerprint == alexnet.graph.fingerprint()
    assert estimate.all_reduce_link.bandwidth_bytes_per_s == 5e9 / 8
    assert estimate.hardware.startswith("gpu-t4 (estimated; calibrated on alexnet.graph.txt")


@pytest.mark.parametrize(
    ("device_type", "is_faster"), [("gpu-t4", False), ("gpu-a100", True), ("cpu-c5", False)]
)
def test_no_layer_is_faster_on_a_slower_device_or_slower_on_a_faster_one(alexnet, device_type, is_faster):
    measured = alexnet.profiles["gpu-v100"]

    estimate = estimate_each_layer(alexnet.graph, measured, DEVICE_TYPES[device_type])

    for there, here in zip(milliseconds(estimate), milliseconds(measured), strict=True):
        assert (there <= here) if is_faster else (there >= here)


def test_a_machine_of_unknown_rates_calibrates_nothing(alexnet):
    measured = replace(alexnet.profiles["gpu-v100"], machine_speed=None)

    with pytest.raises(ConfigurationError, match="whose rates are known, but those of gpu-v100 are not"):
        estimate_each_layer(alexnet.graph, measured, DEVICE_TYPES["gpu-t4"])
