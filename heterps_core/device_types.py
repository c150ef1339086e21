"""The device types that plans place layers on, with the published figures of one unit and the source of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from heterps_core.errors import UnknownNameError
from heterps_core.hardware import SPOT_SUFFIX, DeviceKind, DeviceType, Market
from heterps_core.units import BYTES_PER_GIB, BYTES_PER_MIB, BYTES_PER_S_PER_MBIT_PER_S


def get_device_type(name: str) -> DeviceType:
    """Look a device type up by name; the name of a known one with SPOT_SUFFIX is that type on spot.

    Raises:
        UnknownNameError: The table has no such type.

    Example:
        >>> get_device_type("gpu-t4-spot").market, get_device_type("gpu-t4-spot").instance_families[0]
        (<Market.SPOT: 'spot'>, 'g4dn')
    """
    hardware = name.removesuffix(SPOT_SUFFIX)
    if hardware not in DEVICE_TYPES:
        raise UnknownNameError("device type", name, DEVICE_TYPES)
    return DEVICE_TYPES[hardware].in_market(Market.SPOT if hardware != name else Market.ON_DEMAND)


def in_markets(device_types: Sequence[str], markets: Sequence[Market]) -> list[str]:
    """Return the names of device types as bought in each of some markets.

    Raises:
        UnknownNameError: The table has no such type.

    Example:
        >>> in_markets(["cpu-c7i", "gpu-t4"], [Market.ON_DEMAND, Market.SPOT])
        ['cpu-c7i', 'cpu-c7i-spot', 'gpu-t4', 'gpu-t4-spot']
    """
    names = [get_device_type(name).in_market(market).name for name in device_types for market in markets]
    return list(dict.fromkeys(names))


_LAUNCH_SOURCE = (
    "assumed: no vendor publishes the cost of an operation under a framework; 5 microseconds is the order of "
    "a launch in NVIDIA Technical Blog, Getting Started with CUDA Graphs (2019), and of PyTorch's dispatch"
)
_NETWORK_SOURCE = (
    "Amazon EC2 instance type specifications, baseline network bandwidth divided by units, "
    "least over the sizes (figures in infra/prices/snapshots)"
)


def _cpu_sources(peak: str, bandwidth: str, *, size: str) -> dict[str, str]:
    return {
        "memory_bytes": "Amazon EC2 instance type specifications, memory divided by units",
        "kernel_launch_seconds": _LAUNCH_SOURCE,
        "peak_fp32_flops_per_s": f"Amazon EC2 DescribeInstanceTypes, sustained clock speed {peak}",
        "memory_bandwidth_bytes_per_s": bandwidth,
        "network_bandwidth_bytes_per_s": f"{_NETWORK_SOURCE}: {size}",
    }


def _gpu_sources(card: str, peak: str, bandwidth: str, *, size: str) -> dict[str, str]:
    sheet = f"NVIDIA {card} GPU datasheet"
    return {
        "memory_bytes": "Amazon EC2 DescribeInstanceTypes, accelerator memory (figures in infra/prices/snapshots)",
        "kernel_launch_seconds": _LAUNCH_SOURCE,
        "peak_fp32_flops_per_s": f"{sheet}{peak}",
        "memory_bandwidth_bytes_per_s": f"{sheet}{bandwidth}",
        "network_bandwidth_bytes_per_s": f"{_NETWORK_SOURCE}: {size}",
    }


_cpu = partial(DeviceType, kind=DeviceKind.CPU)
_gpu = partial(DeviceType, kind=DeviceKind.GPU)

_T4 = _gpu(
    name="gpu-t4",
    peak_fp32_flops_per_s=8.1e12,
    memory_bandwidth_bytes_per_s=320e9,
    memory_bytes=16_384 * BYTES_PER_MIB,
    network_bandwidth_bytes_per_s=5_000 * BYTES_PER_S_PER_MBIT_PER_S,
    accelerator_name="t4",
    instance_families=("g4dn",),
    sources=_gpu_sources("T4 Tensor Core", ": 8.1 TFLOPS single precision", ": 320 GB/s", size="g4dn.xlarge"),
)

DEVICE_TYPES: dict[str, DeviceType] = {
    each.name: each
    for each in (
        _cpu(
            name="cpu-c5",
            peak_fp32_flops_per_s=217.6e9,
            memory_bandwidth_bytes_per_s=140.8e9 / 24,
            memory_bytes=4 * BYTES_PER_GIB,
            network_bandwidth_bytes_per_s=12_000 / 24 * BYTES_PER_S_PER_MBIT_PER_S,
            vcpus_per_unit=2,
            instance_families=("c5",),
            equal_families=("c5d",),
            sources=_cpu_sources(
                "3.4 GHz x 2 FMA units x 16 x 2 (Intel Xeon Scalable, AVX-512)",
                "6 channels DDR4-2933 = 140.8 GB/s a socket of 24 cores (Intel Xeon Platinum 8200 product brief)",
                size="c5.12xlarge",
            ),
        ),
        _cpu(
            name="cpu-c7i",
            peak_fp32_flops_per_s=204.8e9,
            memory_bandwidth_bytes_per_s=307.2e9 / 48,
            memory_bytes=4 * BYTES_PER_GIB,
            network_bandwidth_bytes_per_s=50_000 / 96 * BYTES_PER_S_PER_MBIT_PER_S,
            vcpus_per_unit=2,
            instance_families=("c7i",),
            equal_families=("m7i", "r7i"),
            sources=_cpu_sources(
                "3.2 GHz x 2 FMA units x 16 x 2 (Intel Sapphire Rapids, AVX-512)",
                "8 channels DDR5-4800 = 307.2 GB/s a socket of 48 cores (Intel 4th Gen Xeon Scalable product brief)",
                size="c7i.48xlarge",
            ),
        ),
        _cpu(
            name="cpu-r6in",
            peak_fp32_flops_per_s=224e9,
            memory_bandwidth_bytes_per_s=204.8e9 / 32,
            memory_bytes=16 * BYTES_PER_GIB,
            network_bandwidth_bytes_per_s=3_125 * BYTES_PER_S_PER_MBIT_PER_S,
            vcpus_per_unit=2,
            instance_families=("r6in",),
            equal_families=("r6idn",),
            sources=_cpu_sources(
                "3.5 GHz x 2 FMA units x 16 x 2 (Intel Ice Lake, AVX-512)",
                "8 channels DDR4-3200 = 204.8 GB/s a socket of 32 cores (Intel 3rd Gen Xeon Scalable product brief)",
                size="r6in.large",
            ),
        ),
        _cpu(
            name="cpu-m7a",
            peak_fp32_flops_per_s=118.4e9,
            memory_bandwidth_bytes_per_s=460.8e9 / 96,
            memory_bytes=4 * BYTES_PER_GIB,
            network_bandwidth_bytes_per_s=50_000 / 192 * BYTES_PER_S_PER_MBIT_PER_S,
            # No simultaneous multithreading on M7a: a vCPU is a core (EC2 User Guide, CPU options).
            vcpus_per_unit=1,
            instance_families=("m7a",),
            equal_families=("r7a",),
            sources=_cpu_sources(
                "3.7 GHz x 2 FMA pipes x 8 x 2 (AMD, Software Optimization Guide for Zen 4)",
                "12 channels DDR5-4800 = 460.8 GB/s a socket of 96 cores (AMD EPYC 9004 data sheet)",
                size="m7a.48xlarge",
            ),
        ),
        _T4,
        replace(
            _T4,
            name="gpu-t4-20gbit",
            # A dense tower on a T4 can eat four times what the network of the smallest host brings it.
            network_bandwidth_bytes_per_s=20_000 * BYTES_PER_S_PER_MBIT_PER_S,
            instance_families=("g4dn",),
            sources={
                **_T4.sources,
                "network_bandwidth_bytes_per_s": f"{_NETWORK_SOURCE}: g4dn.4xlarge; sizes with less are gpu-t4",
            },
        ),
        _gpu(
            name="gpu-a10g",
            peak_fp32_flops_per_s=31.2e12,
            memory_bandwidth_bytes_per_s=600e9,
            memory_bytes=22_888 * BYTES_PER_MIB,
            network_bandwidth_bytes_per_s=2_500 * BYTES_PER_S_PER_MBIT_PER_S,
            accelerator_name="a10g",
            instance_families=("g5",),
            sources=_gpu_sources(
                "A10 Tensor Core",
                ": 31.2 TFLOPS; the A10G of AWS has the same 9,216 cores at a slightly higher clock, so this errs "
                "on the low side",
                ": 600 GB/s; the A10G has the same memory",
                size="g5.xlarge",
            ),
        ),
        _gpu(
            name="gpu-l4",
            peak_fp32_flops_per_s=30.3e12,
            memory_bandwidth_bytes_per_s=300e9,
            memory_bytes=22_888 * BYTES_PER_MIB,
            network_bandwidth_bytes_per_s=2_500 * BYTES_PER_S_PER_MBIT_PER_S,
            accelerator_name="l4",
            instance_families=("g6",),
            equal_families=("gr6",),
            sources=_gpu_sources("L4 Tensor Core", ": 30.3 TFLOPS", ": 300 GB/s", size="g6.xlarge"),
        ),
        _gpu(
            name="gpu-l40s",
            peak_fp32_flops_per_s=91.6e12,
            memory_bandwidth_bytes_per_s=864e9,
            memory_bytes=45_776 * BYTES_PER_MIB,
            network_bandwidth_bytes_per_s=2_500 * BYTES_PER_S_PER_MBIT_PER_S,
            accelerator_name="l40s",
            instance_families=("g6e",),
            sources=_gpu_sources("L40S", ": 91.6 TFLOPS", ": 864 GB/s", size="g6e.xlarge"),
        ),
        _gpu(
            name="gpu-v100",
            peak_fp32_flops_per_s=15.7e12,
            memory_bandwidth_bytes_per_s=900e9,
            memory_bytes=16 * BYTES_PER_GIB,
            network_bandwidth_bytes_per_s=2_500 * BYTES_PER_S_PER_MBIT_PER_S,
            accelerator_name="v100",
            instance_families=("p3",),
            sources=_gpu_sources("V100 Tensor Core", ", SXM2: 15.7 TFLOPS", ": 900 GB/s", size="p3.2xlarge")
            | {"memory_bytes": "NVIDIA V100 Tensor Core GPU datasheet: 16 GB HBM2"},
        ),
        _gpu(
            name="gpu-a100",
            peak_fp32_flops_per_s=19.5e12,
            memory_bandwidth_bytes_per_s=1_555e9,
            memory_bytes=40_960 * BYTES_PER_MIB,
            network_bandwidth_bytes_per_s=400_000 / 8 * BYTES_PER_S_PER_MBIT_PER_S,
            accelerator_name="a100",
            instance_families=("p4d",),
            sources=_gpu_sources(
                "A100 Tensor Core", ": 19.5 TFLOPS, without TF32", ", 40 GB: 1,555 GB/s", size="p4d.24xlarge"
            ),
        ),
        _gpu(
            name="gpu-h100",
            peak_fp32_flops_per_s=67e12,
            memory_bandwidth_bytes_per_s=3_350e9,
            memory_bytes=81_920 * BYTES_PER_MIB,
            network_bandwidth_bytes_per_s=100_000 * BYTES_PER_S_PER_MBIT_PER_S,
            accelerator_name="h100",
            instance_families=("p5",),
            sources=_gpu_sources(
                "H100 Tensor Core", ", SXM: 67 TFLOPS", ", SXM: 3.35 TB/s", size="p5.4xlarge"
            ),
        ),
    )
}
