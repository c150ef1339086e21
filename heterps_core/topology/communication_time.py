"""What collectives and messages cost by the alpha-beta model: fixed times of hops, plus bytes over bandwidth.

The formulas are those of PaddlePaddle's automatic parallelism (arXiv 2112.02752 and its released code), with
latencies in seconds. All functions take numbers and NumPy arrays alike.

Symbols: n ranks, m machines that hold them (1 <= m <= n), b bytes, beta seconds per byte of the slowest link among
them, h switches between two machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

PCIE_SECONDS = 5.7e-6
"""One hop between two cards of a machine; 3.4e-6 over NVLink (PaddlePaddle's cost model, its own figures)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkLatencies:
    """Fixed times of the model."""

    ring_base_seconds: float
    """To begin a ring, or a message."""

    tree_base_seconds: float
    intra_machine_seconds: float
    """One hop between two devices of a machine."""

    inter_machine_seconds: float
    """One hop between two machines, without switches."""

    switch_seconds: float
    """Each switch on the way."""


PADDLE_LATENCIES = LinkLatencies(
    ring_base_seconds=8.4e-6,
    tree_base_seconds=0.0,
    intra_machine_seconds=PCIE_SECONDS,
    inter_machine_seconds=28e-6,
    # The sources at hand name no figure: count it into the network's hop.
    switch_seconds=0.0,
)
"""Constants of PaddlePaddle's cost model for cards on PCIe; measure your own where it matters."""


def ring_all_reduce_seconds(
    num_bytes: Any,
    *,
    num_ranks: Any,
    num_machines: Any,
    bandwidth_bytes_per_s: Any,
    latencies: LinkLatencies,
    num_switches: Any = 0,
) -> Any:
    r"""Return the time of an all-reduce over a ring that passes each machine once.

    .. math:: base + 2 (n - m) a_{intra} + 2 (m - 1) (a_{inter} + h\, a_{switch}) + 2 \frac{n - 1}{n} b \beta

    In the ring every chunk takes 2 (n - 1) hops. The formula counts the fewest of them that can lie between
    machines; a chunk that begins elsewhere crosses one link more in each half, so this may be short by two
    differences of latencies.

    Args:
        num_bytes: b, of the tensor that each rank holds.
        num_ranks: n, at least 1; one rank takes no time.
        num_machines: m.
        bandwidth_bytes_per_s: Of the slowest link in the ring.
        latencies: The fixed times.
        num_switches: h.

    Example:
        >>> fixed = LinkLatencies(ring_base_seconds=0, tree_base_seconds=0, intra_machine_seconds=1,
        ...     inter_machine_seconds=10, switch_seconds=0)
        >>> float(ring_all_reduce_seconds(400, num_ranks=4, num_machines=2, bandwidth_bytes_per_s=100,
        ...     latencies=fixed))
        30.0
    """
    between_seconds = latencies.inter_machine_seconds + num_switches * latencies.switch_seconds
    seconds = (
        latencies.ring_base_seconds
        + 2 * (num_ranks - num_machines) * latencies.intra_machine_seconds
        + 2 * (num_machines - 1) * between_seconds
        + 2 * (num_ranks - 1) / num_ranks * num_bytes / bandwidth_bytes_per_s
    )
    return np.where(np.greater(num_ranks, 1), seconds, 0.0)


def tree_all_reduce_seconds(
    num_bytes: Any,
    *,
    num_ranks: Any,
    num_machines: Any,
    bandwidth_bytes_per_s: Any,
    latencies: LinkLatencies,
    num_switches: Any = 0,
) -> Any:
    r"""Return the time of an all-reduce over a tree of machines with a chain of ranks inside each.

    .. math:: base + 2 (n / m - 1) a_{intra} + \log_2 m\, (a_{inter} + h\, a_{switch}) + 2 b \beta

    Takes fewer hops than a ring among many machines, for up to n / (n - 1) of its bytes. The source counts the
    way up the tree only: a tree that goes down again by the same steps takes the logarithm twice. Arguments as in
    `ring_all_reduce_seconds`.
    """
    between_seconds = latencies.inter_machine_seconds + num_switches * latencies.switch_seconds
    seconds = (
        latencies.tree_base_seconds
        + 2 * (num_ranks / num_machines - 1) * latencies.intra_machine_seconds
        + np.log2(num_machines) * between_seconds
        + 2 * num_bytes / bandwidth_bytes_per_s
    )
    return np.where(np.greater(num_ranks, 1), seconds, 0.0)


def all_gather_seconds(
    num_bytes: Any,
    *,
    num_ranks: Any,
    num_machines: Any,
    bandwidth_bytes_per_s: Any,
    latencies: LinkLatencies,
    num_switches: Any = 0,
) -> Any:
    r"""Return the time in which every rank gets the parts of all others over a ring.

    .. math:: base + (n - m) a_{intra} + (m - 1) (a_{inter} + h\, a_{switch}) + \frac{n - 1}{n} b \beta

    Here b counts the bytes of all parts together. Half of an all-reduce, see `ring_all_reduce_seconds`.
    """
    between_seconds = latencies.inter_machine_seconds + num_switches * latencies.switch_seconds
    seconds = (
        latencies.ring_base_seconds
        + (num_ranks - num_machines) * latencies.intra_machine_seconds
        + (num_machines - 1) * between_seconds
        + (num_ranks - 1) / num_ranks * num_bytes / bandwidth_bytes_per_s
    )
    return np.where(np.greater(num_ranks, 1), seconds, 0.0)


def message_seconds(
    num_bytes: Any,
    *,
    crosses_machines: Any,
    bandwidth_bytes_per_s: Any,
    latencies: LinkLatencies,
    num_switches: Any = 0,
) -> Any:
    r"""Return the time of a send, a receive, or a broadcast that is passed on without waiting.

    .. math:: base + a + b \beta,\quad a = a_{inter} + h\, a_{switch}\ \text{or}\ a_{intra}

    Args:
        num_bytes: b.
        crosses_machines: Whether sender and receiver are on different machines.
        bandwidth_bytes_per_s: Of the slowest link on the way.
        latencies: The fixed times.
        num_switches: h.
    """
    between_seconds = latencies.inter_machine_seconds + num_switches * latencies.switch_seconds
    hop_seconds = np.where(crosses_machines, between_seconds, latencies.intra_machine_seconds)
    return latencies.ring_base_seconds + hop_seconds + num_bytes / bandwidth_bytes_per_s
