"""Two devices of unlike speed out of one machine, and what the planner is told of them.

Each device is a core with one thread. The slow one is an older processor: its convolutions and fused products may use
no instructions beyond AVX (no fused multiply-add, no AVX-512), everything else is as fast as on the other. So layers
differ in how much slower they are on it, as they do between real devices.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from heterps_core.measurement.placed_plan import Device
from heterps_core.models.image_blocks import block_sizes
from heterps_core.models.image_chain import build_image_chain
from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.problem.problem_builder import UnitTerms, build_problem
from heterps_core.planning.problem.scheduling_problem import LayerCosts, SchedulingProblem
from heterps_core.planning.search.optimum import find_optimum, highest_throughput
from heterps_core.profiling.layer_profiler import trace_model
from heterps_core.profiling.measuring_process import ProfileRequest, measure_in_fresh_process

NUM_IMAGES = 50_000
"""Of CIFAR-10's training set."""

MEMORY_BYTES = 8e9


def unlike_devices() -> dict[str, Device]:
    """Return the two devices of this machine.

    Raises:
        SystemExit: This process may use one core only.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two devices need two cores, but this process may use one; allow it more")
    return {
        "fast": Device(cores=(cores[0],)),
        "slow": Device(cores=(cores[1],), environment={"ONEDNN_MAX_CPU_ISA": "AVX"}),
    }


def profiled_problem(
    model: str, devices: dict[str, Device], *, batch_size: int, num_microbatches: int, seed: int
) -> SchedulingProblem:
    """Profile the layers of an image classifier on each device and return the problem of placing its blocks.

    Each device is a type of one unit, all at one price.
    """
    request = ProfileRequest(
        model=model,
        features=None,
        batch_size=batch_size // num_microbatches,
        dense_optimizer="sgd",
        seed=seed,
    )
    profiles = {}
    for name, device in devices.items():
        with running_as(device):
            profiles[name] = measure_in_fresh_process(request)
    terms = {
        name: UnitTerms(
            price_usd_per_hour=1.0,
            max_units=1,
            memory_bytes=MEMORY_BYTES,
            bandwidth_bytes_per_s=profile.boundary_link.bandwidth_bytes_per_s,
        )
        for name, profile in profiles.items()
    }
    problem = build_problem(
        trace_model(request),
        profiles,
        terms,
        batch_size=batch_size,
        num_samples=NUM_IMAGES,
        num_epochs=1,
        throughput_floor_samples_per_s=0,
    )
    return replace(problem, layers=joined_layers(problem, block_sizes(build_image_chain(model, seed=seed))))


@contextmanager
def running_as(device: Device) -> Iterator[None]:
    """Let child processes that are started inside be as fast as a device.

    They are not pinned: all cores are alike, and a link is measured between two processes.
    """
    environment = dict(os.environ)
    os.environ.update(device.environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)


def joined_layers(problem: SchedulingProblem, sizes: Sequence[int]) -> tuple[LayerCosts, ...]:
    """Return one layer for each block: times and states add up, the last layer's output leaves it."""
    layers = iter(problem.layers)
    joined = []
    for size in sizes:
        members = [next(layers) for _ in range(size)]
        joined.append(
            LayerCosts(
                name=members[0].name,
                kind=members[0].kind,
                is_sharded=False,
                state_bytes=sum(member.state_bytes for member in members),
                output_bytes_per_sample=members[-1].output_bytes_per_sample,
                compute_seconds={
                    name: sum(member.compute_seconds[name] for member in members)
                    for name in problem.device_type_names
                },
                # One unit each: nothing to exchange inside a stage.
                communication_seconds=dict.fromkeys(problem.device_type_names, 0.0),
            )
        )
    return tuple(joined)


def layer_seconds(problem: SchedulingProblem) -> Floats:
    """Return the time of each layer on each device for a whole batch, shape (L, D)."""
    scale = problem.batch_size / problem.profile_batch_size
    return np.array(
        [
            [layer.compute_seconds[name] * scale for name in problem.device_type_names]
            for layer in problem.layers
        ]
    )


def cut_seconds(problem: SchedulingProblem) -> Floats:
    """Return the time of activations and gradients of a batch over each inner boundary, shape (L - 1,)."""
    bandwidth = min(unit.bandwidth_bytes_per_s for unit in problem.device_types.values())
    output_bytes = np.array([layer.output_bytes_per_sample for layer in problem.layers[:-1]])
    return 2 * problem.batch_size * output_bytes / bandwidth


def planned_assignment(problem: SchedulingProblem) -> tuple[int, ...]:
    """Return the plan of highest throughput by this project's cost model."""
    fastest = replace(problem, throughput_floor_samples_per_s=highest_throughput(problem) * (1 - 1e-6))
    names = problem.device_type_names
    return tuple(
        names.index(stage.device_type)
        for stage in find_optimum(fastest).stages
        for _ in range(stage.first_layer, stage.last_layer + 1)
    )
