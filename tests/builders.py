"""Readable test data: random planning problems of plausible size, made from a seed.

The numbers are drawn, not measured: cheap slow CPUs, expensive accelerators that are 10 to 200 times faster on
dense layers and no faster on embeddings, whose tables need the memory of several units.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from heterps_core.planning.problem.scheduling_problem import LayerCosts, SchedulingProblem, UnitType

GIGABYTE = 1e9


def make_problem(
    seed: int,
    *,
    num_layers: int,
    num_types: int,
    max_units: int = 300,
    scarce: bool = False,
    floor_samples_per_s: float | None = None,
) -> SchedulingProblem:
    """Return a random chain of layers on one CPU type and `num_types - 1` accelerators.

    Args:
        seed: Decides everything.
        num_layers: Length of the chain.
        num_types: Device types, the first of them "cpu".
        max_units: Cap on the units of each type.
        scarce: Draw small caps instead (1 to 12 accelerators), so that they often bind over the whole plan.
        floor_samples_per_s: Throughput floor; drawn when it is not given.
    """
    random = np.random.default_rng(seed)
    names = ["cpu", *(f"gpu_{letter}" for letter in "abcdefghijklmnopq"[: num_types - 1])]
    device_types = {
        name: UnitType(
            price_usd_per_hour=0.04 if name == "cpu" else round(float(random.uniform(0.5, 3.5)), 4),
            max_units=_draw_cap(random, name) if scarce else max_units,
            memory_bytes=(4 if name == "cpu" else int(random.choice([16, 24, 40, 80]))) * GIGABYTE,
            bandwidth_bytes_per_s=float(random.choice([1.25e9, 3e9, 12.5e9])),
            compute_parallel_fraction=round(float(random.uniform(0.9, 0.999)), 4),
            communication_parallel_fraction=round(float(random.uniform(0.85, 0.95)), 4),
        )
        for name in names
    }
    return SchedulingProblem(
        model=f"random-{seed}",
        batch_size=4096,
        profile_batch_size=512,
        num_samples=100_000_000,
        num_epochs=1,
        throughput_floor_samples_per_s=(
            float(random.choice([5_000, 20_000, 80_000]))
            if floor_samples_per_s is None
            else floor_samples_per_s
        ),
        layers=tuple(_draw_layer(random, index, names, scarce=scarce) for index in range(num_layers)),
        device_types=device_types,
    )


def _draw_cap(random: np.random.Generator, name: str) -> int:
    return int(random.integers(10, 60)) if name == "cpu" else int(random.integers(1, 13))


def _draw_layer(random: np.random.Generator, index: int, names: list[str], *, scarce: bool) -> LayerCosts:
    is_embedding = bool(random.random() < 0.25)
    cpu_seconds = float(random.uniform(0.01, 0.1))
    if is_embedding:
        compute = {name: cpu_seconds * float(random.uniform(0.5, 1.5)) for name in names}
        communication = {name: float(random.uniform(0.001, 0.05)) for name in names}
        state_bytes = float(random.uniform(0.5, 8 if scarce else 50)) * GIGABYTE
    else:
        compute = {name: cpu_seconds / float(np.exp(random.uniform(2, 5.3))) for name in names}
        compute["cpu"] = cpu_seconds
        communication = {name: float(random.uniform(0, 0.005)) for name in names}
        state_bytes = float(random.uniform(0.002, 0.2)) * GIGABYTE
    return LayerCosts(
        name=f"layer_{index}",
        kind="embedding" if is_embedding else "fully_connected",
        is_sharded=is_embedding,
        state_bytes=round(state_bytes),
        output_bytes_per_sample=float(random.choice([512, 2048, 8192, 65536])),
        compute_seconds={name: round(seconds, 6) for name, seconds in compute.items()},
        communication_seconds={name: round(seconds, 6) for name, seconds in communication.items()},
    )


def with_exchange_work(problem: SchedulingProblem, seed: int) -> SchedulingProblem:
    """Return the problem where exchanges and boundaries cost a worker about as much as their bytes.

    The first layer's rows are read beside computing by all device types but the last, some of them faster than it.
    """
    random = np.random.default_rng(seed)
    work = problem.layers[0].compute_seconds
    reading = {name: work[name] * float(10 ** random.uniform(-1, 1)) for name in list(work)[:-1]}
    return replace(
        problem,
        layers=tuple(
            replace(
                layer,
                exchanged_bytes=26.0 * 136 * problem.profile_batch_size if layer.is_sharded else 1e6,
                reading_seconds={} if index else reading,
            )
            for index, layer in enumerate(problem.layers)
        ),
        device_types={
            name: replace(
                unit,
                exchange_seconds=float(10 ** random.uniform(-4, -2)),
                exchange_seconds_per_peer=float(10 ** random.uniform(-5, -2.5)),
                exchange_seconds_per_table=float(10 ** random.uniform(-4, -2)),
                exchange_seconds_per_byte=float(10 ** random.uniform(-10, -8.5)),
                sum_seconds_per_peer=float(10 ** random.uniform(-5, -2.5)),
                sum_seconds_per_byte=float(10 ** random.uniform(-10, -8.5)),
                boundary_seconds=float(10 ** random.uniform(-4, -2)),
                boundary_seconds_per_byte=float(10 ** random.uniform(-10, -8.5)),
                later_reading_seconds=float(10 ** random.uniform(-4, -2)),
                later_reading_seconds_per_sample=float(10 ** random.uniform(-7, -5)),
            )
            for name, unit in problem.device_types.items()
        },
    )


def with_disks(
    problem: SchedulingProblem,
    *,
    bytes_per_unit: float,
    bytes_per_s: float,
    usd_per_hour: float = 0.0,
    usd_per_gb_hour: float = 0.0,
) -> SchedulingProblem:
    """Return the problem with a disk at every unit; a sample looks up 100 rows of 68 bytes or fewer that are cold."""
    hot_shares = (0.0, 0.05, 0.2)
    return replace(
        problem,
        hot_shares=hot_shares,
        layers=tuple(
            replace(layer, cold_bytes_per_sample=tuple(6_800 * (1 - share**0.3) for share in hot_shares))
            if layer.is_sharded
            else layer
            for layer in problem.layers
        ),
        device_types={
            name: replace(
                unit,
                disk_bytes=bytes_per_unit,
                disk_bytes_per_s=bytes_per_s,
                disk_usd_per_hour=usd_per_hour,
                disk_usd_per_gb_hour=usd_per_gb_hour,
                sweep_seconds_per_byte=1e-8,
            )
            for name, unit in problem.device_types.items()
        },
    )
