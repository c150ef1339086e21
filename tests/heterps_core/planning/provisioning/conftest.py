"""The problem whose replicas were worked out by hand."""

from dataclasses import replace

import pytest

from heterps_core.planning.problem.scheduling_problem import LayerCosts, SchedulingProblem, UnitType


@pytest.fixture
def two_stages() -> SchedulingProblem:
    """An embedding-like stage on CPU and a dense one on GPU, without boundary traffic or memory."""
    cpu = UnitType(
        price_usd_per_hour=0.04,
        max_units=100,
        memory_bytes=1e9,
        bandwidth_bytes_per_s=1e9,
        compute_parallel_fraction=0.97,
        communication_parallel_fraction=0.95,
    )
    first = LayerCosts(
        name="a",
        kind="embedding",
        is_sharded=True,
        state_bytes=0,
        output_bytes_per_sample=0,
        compute_seconds={"cpu": 0.05, "gpu": 1.0},
        communication_seconds={"cpu": 0.08, "gpu": 1.0},
    )
    second = replace(
        first,
        name="b",
        compute_seconds={"cpu": 1.0, "gpu": 0.02},
        communication_seconds={"cpu": 1.0, "gpu": 0.004},
    )
    gpu = replace(
        cpu, price_usd_per_hour=2.42, compute_parallel_fraction=0.99, communication_parallel_fraction=0.9
    )
    return SchedulingProblem(
        model="two stages",
        batch_size=4096,
        profile_batch_size=512,
        num_samples=1e8,
        num_epochs=1,
        throughput_floor_samples_per_s=20_000,
        layers=(first, second),
        device_types={"cpu": cpu, "gpu": gpu},
    )
