"""Latency and bandwidth between two processes of this machine, and the cost of a boundary between stages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from heterps_core.errors import HeterpsError
from heterps_core.profiling.layer_profile import Link
from heterps_core.profiling.measurement.boundary_measurement import measure_boundary
from heterps_core.profiling.measurement.sum_measurement import measure_sum
from heterps_core.profiling.timing import Timing
from heterps_core.transport.peer_sockets import bytes_of
from heterps_core.transport.token_connections import connect_by_token
from heterps_core.units import BYTES_PER_FLOAT32, MS_PER_S

SMALL_FLOATS, LARGE_FLOATS = 256, 1 << 20
"""1 KiB shows the latency, 4 MiB the bandwidth: the gradients of a model of a million parameters."""

SMALL_REPEATS, LARGE_REPEATS = 60, 30

TIMEOUT = timedelta(seconds=60)


def measure_links(store_file: Path, *, rank: int) -> dict[str, Any]:
    """Return the links of a `LayerProfile`, measured with the other process, which has the other rank (0 or 1).

    Raises:
        HeterpsError: The other process did not come.
    """
    # Otherwise gloo binds to what the host name resolves to, which on a laptop may be nothing.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "gloo", init_method=store_file.as_uri(), rank=rank, world_size=2, timeout=TIMEOUT
        )
    except RuntimeError as error:
        raise HeterpsError(
            f"the exchange between two processes could not be measured, "
            f"because they did not meet within {TIMEOUT.seconds} s: {error}"
        ) from error
    try:
        return {
            # All-to-all: of the floats that a process sends, the half goes to itself.
            "exchange_link": _link(_exchange, bytes_on_the_wire=BYTES_PER_FLOAT32 / 2),
            # A ring of two moves 2 * (2 - 1) / 2 of the floats.
            "all_reduce_link": _link(dist.all_reduce, bytes_on_the_wire=BYTES_PER_FLOAT32),
            "boundary_link": _boundary_link(1 - rank),
            "network_boundary": measure_boundary(rank, shares_memory=False),
            "memory_boundary": measure_boundary(rank, shares_memory=True),
            "network_sum": measure_sum(rank, shares_memory=False),
            "memory_sum": measure_sum(rank, shares_memory=True),
        }
    finally:
        dist.destroy_process_group()


def _exchange(floats: torch.Tensor) -> None:
    dist.all_to_all_single(torch.empty_like(floats), floats)


def _boundary_link(other: int) -> Link:
    """Return the link between two stages: one sends, and the other sends back."""
    with connect_by_token({other})[other] as connection:

        def send_and_return(floats: torch.Tensor) -> None:
            content = bytes_of(floats)
            if other == 1:
                connection.sendall(content)
            missing = content
            while missing:
                # A process that has ended sends nothing, which the next one to send notices.
                missing = missing[connection.recv_into(missing) or len(missing) :]
            if other == 0:
                connection.sendall(content)

        return _link(send_and_return, bytes_on_the_wire=2 * BYTES_PER_FLOAT32, num_messages=2)


def _link(
    operation: Callable[[torch.Tensor], object], *, bytes_on_the_wire: float, num_messages: int = 1
) -> Link:
    """Fit time = messages * latency + bytes / bandwidth to a small and a large message.

    Bytes are those of each process for each float, in all messages of the operation together.
    """
    small_seconds = _undisturbed_seconds(operation, SMALL_FLOATS, SMALL_REPEATS)
    large_seconds = _undisturbed_seconds(operation, LARGE_FLOATS, LARGE_REPEATS)
    # On a machine that is busy elsewhere, chance may make the small message the slower one.
    difference_seconds = max(large_seconds - small_seconds, large_seconds / 2)
    return Link(
        latency_seconds=small_seconds / num_messages,
        bandwidth_bytes_per_s=bytes_on_the_wire * (LARGE_FLOATS - SMALL_FLOATS) / difference_seconds,
    )


def _undisturbed_seconds(operation: Callable[[torch.Tensor], object], num_floats: int, repeats: int) -> float:
    """Return the time that a tenth of the repeats keeps.

    Two processes and their gloo threads need two cores at the same moment: where another program takes one, a
    message waits for its time slice of 4 ms, and the median shows that program and not the link.
    """
    floats = torch.zeros(num_floats)
    # Both processes repeat as often; a limit by time would let one leave while the other waits.
    times_ms = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        operation(floats)
        times_ms.append((time.perf_counter() - started_s) * MS_PER_S)
    return Timing.from_repeats(times_ms).low_ms / MS_PER_S
