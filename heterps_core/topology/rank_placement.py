"""Which rank runs on which device, so that the heaviest traffic takes the fastest links.

First the mapper of adaptive distributed training on PaddlePaddle (arXiv 2112.02752): from each placed rank, its
neighbours in order of traffic get the free devices in order of bandwidth, both falling (the released code has both
rising). Then pairs of ranks change places as long as that helps. A group of ranks that began on a badly connected
machine never leaves it by single swaps, so this is done from several beginnings, and the best is kept.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heterps_core.errors import ConfigurationError
from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.topology.device_paths import device_paths
from heterps_core.topology.machine_topology import MachineTopology
from heterps_core.topology.rank_traffic import RankTraffic

MAX_BEGINNINGS = 32
"""Places of each kind on which the mapper begins; where there are fewer, all of them."""

NUM_IMPROVED = 8
"""Of the mapper's choices, the best, in which ranks change places."""

_LEAST_GAIN = 1e-9
"""Relative; smaller gains are rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlacement:
    """A device for every rank."""

    device_ids: tuple[tuple[int, ...], ...]
    """Global ids by stage and replica."""

    seconds_per_step: float
    """Sum over all pairs of bytes over bandwidth: what is minimised. Messages that travel side by side make a
    step shorter than this."""

    plain_order_seconds_per_step: float
    """The same with ranks in order, each on the first free device of its type."""


def place_ranks(traffic: RankTraffic, topology: MachineTopology) -> RankPlacement:
    """Place ranks on devices of their type.

    Raises:
        ConfigurationError: There are too few devices of a type, or no way between two devices.
    """
    paths = device_paths(topology)
    models = [device.model for device in paths.devices]
    for name in dict.fromkeys(traffic.device_types):
        wanted, there = traffic.device_types.count(name), models.count(name)
        if wanted > there:
            raise ConfigurationError(
                f"each rank needs a device of its own: the plan has {wanted} ranks for {name}, "
                f"the topology has {there} such devices"
            )
    fits = np.array(traffic.device_types)[:, None] == np.array(models)
    distances = traffic.bytes_per_step, paths.seconds_per_byte
    places = best_places(*distances, fits)
    ids = [paths.devices[place].global_id for place in places]
    firsts = np.cumsum([0, *traffic.replicas_per_stage]).tolist()
    return RankPlacement(
        device_ids=tuple(
            tuple(ids[first : first + count])
            for first, count in zip(firsts[:-1], traffic.replicas_per_stage, strict=True)
        ),
        seconds_per_step=placement_seconds(places, *distances),
        plain_order_seconds_per_step=placement_seconds(plain_places(fits), *distances),
    )


def best_places(bytes_per_step: Floats, seconds_per_byte: Floats, fits: NDArray[np.bool_]) -> Ints:
    """Return a place for each rank, shape (ranks,), the plain order where nothing better is found.

    Args:
        bytes_per_step: Between ranks, shape (ranks, ranks).
        seconds_per_byte: Between places, shape (places, places); any measure of distance.
        fits: Whether a rank may take a place, shape (ranks, places); ranks of a kind may take the same places, at
            least as many as they are, and no others may take these.
    """

    def seconds_of(places: Ints) -> float:
        return placement_seconds(places, bytes_per_step, seconds_per_byte)

    greedy = [
        greedy_places(bytes_per_step, seconds_per_byte, fits, begin=begin)
        for begin in _beginnings(bytes_per_step, seconds_per_byte, fits)
    ]
    improved = [
        improved_places(places, bytes_per_step, seconds_per_byte, fits)
        for places in sorted(greedy, key=seconds_of)[:NUM_IMPROVED]
    ]
    return min([plain_places(fits), *improved], key=seconds_of)


def plain_places(fits: NDArray[np.bool_]) -> Ints:
    """Return the places of ranks in order, each on the first free one that fits; shape (ranks,)."""
    free, places = fits.copy(), np.zeros(len(fits), dtype=np.int64)
    for rank in range(len(fits)):
        places[rank] = free[rank].argmax()
        free[:, places[rank]] = False
    return places


def placement_seconds(places: Ints, bytes_per_step: Floats, seconds_per_byte: Floats) -> float:
    """Return the sum over all pairs of ranks of bytes times seconds per byte.

    Args:
        places: Index of each rank's device, shape (ranks,).
        bytes_per_step: Shape (ranks, ranks).
        seconds_per_byte: Shape (devices, devices).
    """
    return float((bytes_per_step * seconds_per_byte[np.ix_(places, places)]).sum())


def _beginnings(
    bytes_per_step: Floats, seconds_per_byte: Floats, fits: NDArray[np.bool_]
) -> list[tuple[int, int]]:
    """Return pairs of a rank and a place: the heaviest rank of each kind on the places that it fits."""
    heaviest: dict[bytes, int] = {}
    for rank in _heaviest_first(bytes_per_step):
        heaviest.setdefault(fits[rank].tobytes(), rank)
    remoteness = seconds_per_byte.sum(axis=1)
    beginnings: list[tuple[int, int]] = []
    for rank in heaviest.values():
        places = np.flatnonzero(fits[rank])
        # The best connected first; of many, some of all kinds.
        places = places[np.argsort(remoteness[places], kind="stable")]
        chosen = np.linspace(0, places.size - 1, min(places.size, MAX_BEGINNINGS)).astype(int)
        beginnings.extend((rank, place) for place in places[chosen].tolist())
    return beginnings


def greedy_places(
    bytes_per_step: Floats, seconds_per_byte: Floats, fits: NDArray[np.bool_], *, begin: tuple[int, int]
) -> Ints:
    """Return the mapper's choice as indices of places, shape (ranks,).

    Args:
        bytes_per_step: See `best_places`.
        seconds_per_byte: See `best_places`.
        fits: See `best_places`.
        begin: The rank that is placed first, and its place.
    """
    both_ways_bytes = bytes_per_step + bytes_per_step.T
    nearness = -seconds_per_byte
    free = fits.copy()
    places = np.full(len(fits), -1)

    def take(rank: int, wishes: Floats) -> None:
        places[rank] = np.where(free[rank], wishes, -np.inf).argmax()
        free[:, places[rank]] = False

    first_rank, first_device = begin
    for first in [first_rank, *_heaviest_first(bytes_per_step)]:
        if places[first] < 0:
            # Ranks that have nothing to do with those before them stay as near as they can.
            take(first, nearness[first_device])
            queue = deque([first])
            while queue:
                rank = queue.popleft()
                for neighbour in np.argsort(-both_ways_bytes[rank], kind="stable").tolist():
                    if both_ways_bytes[rank, neighbour] == 0:
                        break
                    if places[neighbour] < 0:
                        take(neighbour, nearness[places[rank]])
                        queue.append(neighbour)
    return places


def _heaviest_first(bytes_per_step: Floats) -> list[int]:
    total_bytes = bytes_per_step.sum(axis=0) + bytes_per_step.sum(axis=1)
    order: list[int] = np.argsort(-total_bytes, kind="stable").tolist()
    return order


def improved_places(
    places: Ints, bytes_per_step: Floats, seconds_per_byte: Floats, fits: NDArray[np.bool_]
) -> Ints:
    """Change places as long as it helps, always the best change first: two ranks swap, or one takes a free device.

    Args:
        places: Where to begin, shape (ranks,).
        bytes_per_step: Shape (ranks, ranks).
        seconds_per_byte: Shape (devices, devices).
        fits: Whether a rank may run on a device, shape (ranks, devices).
    """
    num_ranks, num_devices = fits.shape
    # Idle ranks on the free devices, so that a move is a swap.
    free = np.setdiff1d(np.arange(num_devices), places)
    places = np.concatenate([places, free])
    traffic = np.zeros((num_devices, num_devices))
    traffic[:num_ranks, :num_ranks] = bytes_per_step
    fits = np.concatenate([fits, np.ones((free.size, num_devices), dtype=np.bool_)])
    least_gain = _LEAST_GAIN * placement_seconds(places, traffic, seconds_per_byte)
    while True:
        distance = seconds_per_byte[np.ix_(places, places)]
        # What each rank would cost at the place of each other, all else unchanged.
        moved = traffic @ distance.T + traffic.T @ distance
        stay = np.diag(moved)
        pair = traffic * distance
        swapped = traffic * distance.T
        change = moved + moved.T - stay[:, None] - stay[None, :]
        # The pair's own traffic was taken away twice, and is still there after the swap.
        change += pair + pair.T + swapped + swapped.T
        allowed = fits[:, places] & fits[:, places].T
        change[~allowed] = 0.0
        rank, other = np.unravel_index(change.argmin(), change.shape)
        if change[rank, other] >= -least_gain:
            return places[:num_ranks]
        places[[rank, other]] = places[[other, rank]]
