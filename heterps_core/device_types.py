"""The device types that plans place layers on, with the published figures of one unit and the source of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
_CPU_SOURCES = {
    "memory_bytes": "Amazon EC2 instance type specifications, memory divided by units",
    "kernel_launch_seconds": _LAUNCH_SOURCE,
}
_GPU_SOURCES = {
    "memory_bytes": "Amazon EC2 DescribeInstanceTypes, accelerator memory (figures in infra/prices/snapshots)",
    "kernel_launch_seconds": _LAUNCH_SOURCE,
}
_EC2_CLOCK = "Amazon EC2 DescribeInstanceTypes, sustained clock speed"

_T4 = DeviceType(
    name="gpu-t4",
    kind=DeviceKind.GPU,
    peak_fp32_flops_per_s=8.1e12,
    memory_bandwidth_bytes_per_s=320e9,
    memory_bytes=16_384 * BYTES_PER_MIB,
    network_bandwidth_bytes_per_s=5_000 * BYTES_PER_S_PER_MBIT_PER_S,
    accelerator_name="t4",
    instance_families=("g4dn",),
    sources=_GPU_SOURCES
    | {
        "peak_fp32_flops_per_s": "NVIDIA T4 Tensor Core GPU datasheet: 8.1 TFLOPS single precision",
        "memory_bandwidth_bytes_per_s": "NVIDIA T4 Tensor Core GPU datasheet: 320 GB/s",
        "network_bandwidth_bytes_per_s": f"{_NETWORK_SOURCE}: g4dn.xlarge",
    },
)

DEVICE_TYPES: dict[str, DeviceType] = {
    each.name: each
    for each in (
        DeviceType(
            name="cpu-c5",
            kind=DeviceKind.CPU,
            peak_fp32_flops_per_s=217.6e9,
            memory_bandwidth_bytes_per_s=140.8e9 / 24,
            memory_bytes=4 * BYTES_PER_GIB,
            network_bandwidth_bytes_per_s=12_000 / 24 * BYTES_PER_S_PER_MBIT_PER_S,
            vcpus_per_unit=2,
            instance_families=("c5",),
            equal_families=("c5d",),
            sources=_CPU_SOURCES
            | {
                "peak_fp32_flops_per_s": f"{_EC2_CLOCK} 3.4 GHz x 2 FMA units x 16 x 2 "
                "(Intel Xeon Scalable, AVX-512)",
                "memory_bandwidth_bytes_per_s": "6 channels DDR4-2933 = 140.8 GB/s a socket of 24 cores "
                "(Intel Xeon Platinum 8200 product brief)",
                "network_bandwidth_bytes_per_s": f"{_NETWORK_SOURCE}: c5.12xlarge",
            },
        ),
        DeviceType(
            name="cpu-c7i",
            kind=DeviceKind.CPU,
            peak_fp32_flops_per_s=204.8e9,
            memory_bandwidth_bytes_per_s=307.2e9 / 48,
            memory_bytes=4 * BYTES_PER_GIB,
            network_bandwidth_bytes_per_s=50_000 / 96 * BYTES_PER_S_PER_MBIT_PER_S,
            vcpus_per_unit=2,
            instance_families=("c7i",),
            equal_families=("m7i", "r7i"),
            sources=_CPU_SOURCES
            | {
                "peak_fp32_flops_per_s": f"{_EC2_CLOCK} 3.2 GHz x 2 FMA units x 16 x 2 "
                "(Intel Sapphire Rapids, AVX-512)",
                "memory_bandwidth_bytes_per_s": "8 channels DDR5-4800 = 307.2 GB/s a socket of 48 cores "
                "(Intel 4th Gen Xeon Scalable product brief)",
                "network_bandwidth_bytes_per_s": f"{_NETWORK_SOURCE}: c7i.48xlarge",
            },
        ),
        DeviceType(
            name="cpu-r6in",
            kind=DeviceKind.CPU,
            peak_fp32_flops_per_s=224e9,
            memory_bandwidth_bytes_per_s=204.8e9 / 32,
            memory_bytes=16 * BYTES_PER_GIB,
            network_bandwidth_bytes_per_s=3_125 * BYTES_PER_S_PER_MBIT_PER_S,
            vcpus_per_unit=2,
            instance_families=("r6in",),
            equal_families=("r6idn",),
            sources=_CPU_SOURCES
            | {
                "peak_fp32_flops_per_s": f"{_EC2_CLOCK} 3.5 GHz x 2 FMA units x 16 x 2 "
                "(Intel Ice Lake, AVX-512)",
                "memory_bandwidth_bytes_per_s": "8 channels DDR4-3200 = 204.8 GB/s a socket of 32 cores "
                "(Intel 3rd Gen Xeon Scalable product brief)",
                "network_bandwidth_bytes_per_s": f"{_NETWORK_SOURCE}: r6in.large",
            },
        ),
        DeviceType(
            name="cpu-m7a",
            kind=DeviceKind.CPU,
            peak_fp32_flops_per_s=118.4e9,
            memory_bandwidth_bytes_per_s=460.8e9 / 96,
            memory_bytes=4 * BYTES_PER_GIB,
            network_bandwidth_bytes_per_s=50_000 / 192 * BYTES_PER_S_PER_MBIT_PER_S,
            # No simultaneous multithreading on M7a: a vCPU is a core (EC2 User Guide, CPU options).
            vcpus_per_unit=1,
            instance_families=("m7a",),
            equal_families=("r7a",),
            sources=_CPU_SOURCES
            | {
                "peak_fp32_flops_per_s": f"{_EC2_CLOCK} 3.7 GHz x 2 FMA pipes x 8 x 2 "
                "(AMD, Software Optimization Guide for Zen 4)",
                "memory_bandwidth_bytes_per_s": "12 channels DDR5-4800 = 460.8 GB/s a socket of 96 cores "
                "(AMD EPYC 9004 data sheet)",
                "network_bandwidth_bytes_per_s": f"{_NETWORK_SOURCE}: m7a.48xlarge",
            },
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
        DeviceType(
            name="gpu-a10g",
            kind=DeviceKind.GPU,
            peak_fp32_flops_per_s=31.2e12,
            memory_bandwidth_bytes_per_s=600e9,
            memory_bytes=22_888 * BYTES_PER_MIB,
            network_bandwidth_bytes_per_s=2_500 * BYTES_PER_S_PER_MBIT_PER_S,
            accelerator_name="a10g",
            instance_families=("g5",),
            sources=_GPU_SOURCES
            | {
                "peak_fp32_flops_per_s": "NVIDIA A10 Tensor Core GPU datasheet: 31.2 TFLOPS; the A10G of AWS "
                "has the same 9,216 cores at a slightly higher clock, so this errs on the low side",
                "memory_bandwidth_bytes_per_s": "NVIDIA A10 Tensor Core GPU datasheet: 600 GB/s; the A10G "
                "has the same memory",
                "network_bandwidth_bytes_per_s": f"{_NETWORK_SOURCE}: g5.xlarge",
            },
        ),
        DeviceType(
            name="gpu-l4",
            kind=DeviceKind.GPU,
            peak_fp32_flops_per_s=30.3e12,
            memory_bandwidth_bytes_per_s=300e9,
            memory_bytes=22_888 * BYTES_PER_MIB,
            network_bandwidth_bytes_per_s=2_500 * BYTES_PER_S_PER_MBIT_PER_S,
            accelerator_name="l4",
            instance_families=("g6",),
            equal_families=("gr6",),
            sources=_GPU_SOURCES
            | {
                "peak_fp32_flops_per_s": "NVIDIA L4 Tensor Core GPU datasheet: 30.3 TFLOPS",
                "memory_bandwidth_bytes_per_s": "NVIDIA L4 Tensor Core GPU datasheet: 300 GB/s",
                "network_bandwidth_bytes_per_s": f"{_NETWORK_SOURCE}: g6.xlarge",
            },
        ),
        DeviceType(
            name="gpu-l40s",
            kind=DeviceKind.GPU,
            peak_fp32_flops_per_s=91.6e12,
            memory_bandwidth_bytes_per_s=864e9,
            memory_bytes=45_776 * BYTES_PER_MIB,
            network_bandwidth_bytes_per_s=2_500 * BYTES_PER_S_PER_MBIT_PER_S,
            accelerator_name="l40s",
            instance_families=("g6e",),
            sources=_GPU_SOURCES
            | {
                "peak_fp32_flops_per_s": "NVIDIA L40S GPU datasheet: 91.6 TFLOPS",
                "memory_bandwidth_bytes_per_s": "NVIDIA L40S GPU datasheet: 864 GB/s",
                "network_bandwidth_bytes_per_s": f"{_NETWORK_SOURCE}: g6e.xlarge",
            },
        ),
        DeviceType(
            name="gpu-v100",
            kind=DeviceKind.GPU,
            peak_fp32_flops_per_s=15.7e12,
            memory_bandwidth_bytes_per_s=900e9,
            memory_bytes=16 * BYTES_PER_GIB,
            network_bandwidth_bytes_per_s=2_500 * BYTES_PER_S_PER_MBIT_PER_S,
            accelerator_name="v100",
            instance_families=("p3",),
            sources=_GPU_SOURCES
            | {
                "peak_fp32_flops_per_s": "NVIDIA V100 Tensor Core GPU datasheet, SXM2: 15.7 TFLOPS",
                "memory_bandwidth_bytes_per_s": "NVIDIA V100 Tensor Core GPU datasheet: 900 GB/s",
                "memory_bytes": "NVIDIA V100 Tensor Core GPU datasheet: 16 GB HBM2",
                "network_bandwidth_bytes_per_s": f"{_NETWORK_SOURCE}: p3.2xlarge",
            },
        ),
        DeviceType(
            name="gpu-a100",
            kind=DeviceKind.GPU,
            peak_fp32_flops_per_s=19.5e12,
            memory_bandwidth_bytes_per_s=1_555e9,
            memory_bytes=40_960 * BYTES_PER_MIB,
            network_bandwidth_bytes_per_s=400_000 / 8 * BYTES_PER_S_PER_MBIT_PER_S,
            accelerator_name="a100",
            instance_families=("p4d",),
            sources=_GPU_SOURCES
            | {
                "peak_fp32_flops_per_s": "NVIDIA A100 Tensor Core GPU datasheet: 19.5 TFLOPS, without TF32",
                "memory_bandwidth_bytes_per_s": "NVIDIA A100 Tensor Core GPU datasheet, 40 GB: 1,555 GB/s",
                "network_bandwidth_bytes_per_s": f"{_NETWORK_SOURCE}: p4d.24xlarge",
            },
        ),
        DeviceType(
            name="gpu-h100",
            kind=DeviceKind.GPU,
            peak_fp32_flops_per_s=67e12,
            memory_bandwidth_bytes_per_s=3_350e9,
            memory_bytes=81_920 * BYTES_PER_MIB,
            network_bandwidth_bytes_per_s=100_000 * BYTES_PER_S_PER_MBIT_PER_S,
            accelerator_name="h100",
            instance_families=("p5",),
            sources=_GPU_SOURCES
            | {
                "peak_fp32_flops_per_s": "NVIDIA H100 Tensor Core GPU datasheet, SXM: 67 TFLOPS",
                "memory_bandwidth_bytes_per_s": "NVIDIA H100 Tensor Core GPU datasheet, SXM: 3.35 TB/s",
                "network_bandwidth_bytes_per_s": f"{_NETWORK_SOURCE}: p5.4xlarge",
            },
        ),
    )
}
