"""Which row stands at which position of a batch, as a formula: no array of the rows, no state, no replica in it.

A keyed permutation puts the row groups of an epoch into a new sequence. It is cut into lanes that are read side by
side, every other one from its end; each batch takes the next rows of every lane, in the order of lanes, so that a
replica, which works on the same positions of every batch, meets the same few lanes from the first step to the last.
Two lanes with a row group in common both begin or both end with it, so it is read once. Within the part of a row
group that lies in a lane another keyed permutation orders the rows: what is shuffled is what lies in memory, one row
group for each lane. Batch and position name a row directly, so a run goes on from the number of its step, with any
number of replicas.

Symbols: G = row groups, N = rows, B = rows of a batch, T = N // B batches, L = lanes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from heterps_core.data.hashing import UInt64Array, mix
from heterps_core.errors import ConfigurationError

MAX_LANES = 1_024
"""31 replicas then share few row groups: at most 30 of 1,024 lanes are read twice."""

_ROUNDS = 4
_ODD = np.uint64(0x9E3779B97F4A7C15)
_GROUPS_PER_BLOCK = 4_096

Int64Array = npt.NDArray[np.int64]
Starts = npt.NDArray[np.integer[Any]]


def _permute(
    values: npt.NDArray[Any], sizes: npt.NDArray[Any] | int, keys: npt.NDArray[Any] | np.uint64
) -> Int64Array:
    """Return where a keyed permutation of 0..size - 1 takes each value [n]; sizes and keys may differ by value.

    Each round is a bijection of the numbers of as many bits (xor with one part of the key, multiplication by another,
    made odd, and the high bits xored onto the low ones); what falls outside of 0..size - 1 goes round again until it
    falls inside, which keeps it a bijection (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). It
    has to mix, not to hide.

    Example:
        >>> sorted(_permute(np.arange(5), 5, np.uint64(1)).tolist())
        [0, 1, 2, 3, 4]
    """
    result = values.astype(np.uint64)
    size = np.broadcast_to(np.asarray(sizes, dtype=np.uint64), result.shape)
    key = np.broadcast_to(np.asarray(keys, dtype=np.uint64), result.shape)
    bits = np.frexp((np.maximum(size, 1) - 1).astype(np.float64))[1].astype(np.uint64)
    mask, half = (np.uint64(1) << bits) - np.uint64(1), (bits + np.uint64(1)) >> np.uint64(1)
    outside: Any = slice(None)
    while True:
        result[outside] = _scramble(result[outside], key[outside], mask[outside], half[outside])
        outside = np.flatnonzero(result >= size)
        if not len(outside):
            return result.view(np.int64)


def _scramble(values: UInt64Array, keys: UInt64Array, mask: UInt64Array, half: UInt64Array) -> UInt64Array:
    for _ in range(_ROUNDS):
        keys = keys * _ODD + np.uint64(1)
        values = ((values ^ (keys >> np.uint64(32))) * (keys | np.uint64(1))) & mask
        values ^= values >> half
    return values


class EpochOrder:
    """The order of one epoch.

    Attributes:
        batch_size: Rows of a batch B.
        num_batches: Full batches T, at least 1. The last N - T B rows are left out of this epoch, and
            another epoch leaves out others; fewer rows than one batch takes are repeated in it.

    Args:
        group_starts: First row of each row group, then the number of rows [G + 1]; ascending.
        seed: Of the run; None leaves the rows of each lane in their order, which held-out rows are read in.
        max_lanes: So many row groups are held in memory by all replicas of a stage together.
        request_starts: First row of each request, then the number of rows: rows of a request that lie in one lane and
            row group stay together, in their order. None shuffles single rows.

    Raises:
        ConfigurationError: There is no row, or the batch size is below 1.
    """

    def __init__(
        self,
        group_starts: Int64Array,
        *,
        batch_size: int,
        seed: int | None,
        epoch: int = 0,
        max_lanes: int = MAX_LANES,
        request_starts: Int64Array | None = None,
    ) -> None:
        if batch_size < 1:
            raise ConfigurationError(f"batch_size must be at least 1, got {batch_size}")
        self._num_rows, self._num_groups = int(group_starts[-1]), len(group_starts) - 1
        if self._num_rows < 1:
            raise ConfigurationError(f"there must be a row to train on, got {self._num_rows}")
        self._group_starts, self._request_starts = group_starts, request_starts
        self._order_of_requests = lru_cache(2 * max_lanes)(self._ordered_requests)
        self.batch_size = batch_size
        self.num_batches = max(1, self._num_rows // batch_size)
        self._num_lanes = max(1, min(batch_size, max_lanes))
        self._key: np.uint64 | None = None
        self._starts: Starts = group_starts
        if seed is not None:
            self._key = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0]
            self._starts = self._permuted_starts()

    def rows(self, batch_index: int | Int64Array, positions: npt.NDArray[Any]) -> Int64Array:
        """Return the row indices [n] at positions [n] of a batch, or of a batch for each position [n].

        Raises:
            ConfigurationError: A batch or a position lies outside.
        """
        lowest, highest = int(np.min(batch_index, initial=0)), int(np.max(batch_index, initial=0))
        if lowest < 0 or highest >= self.num_batches:
            raise ConfigurationError(
                f"batch_index must be in 0..{self.num_batches - 1} for {self._num_rows} rows in batches of "
                f"{self.batch_size}, got {lowest if lowest < 0 else highest}"
            )
        positions = positions.astype(np.int64)
        if len(positions) and not 0 <= positions.min() <= positions.max() < self.batch_size:
            raise ConfigurationError(
                f"positions must be in 0..{self.batch_size - 1}, got {positions.min()} to {positions.max()}"
            )
        if self._num_rows < self.batch_size:
            positions = positions % self._num_rows
            lane = first = np.zeros_like(positions)
            share = np.full_like(positions, self._num_rows)
        else:
            # Lane l has the positions from l B // L on of every batch.
            lane = ((positions + 1) * self._num_lanes - 1) // self.batch_size
            first = lane * self.batch_size // self._num_lanes
            share = (lane + 1) * self.batch_size // self._num_lanes - first
        lane_start = first * self.num_batches
        step = np.where(lane % 2, self.num_batches - 1 - batch_index, batch_index)
        ordered: Int64Array = lane_start + step * share + positions - first
        if self._key is None:
            return ordered
        return self._shuffled(ordered, lane_start, lane_start + share * self.num_batches)

    def _shuffled(self, ordered: Int64Array, lane_start: Int64Array, lane_stop: Int64Array) -> Int64Array:
        """Return the rows at places of the new sequence, shuffled where row group and lane overlap."""
        assert self._key is not None
        place = np.searchsorted(self._starts, ordered.astype(self._starts.dtype), side="right") - 1
        start, stop = self._starts[place].astype(np.int64), self._starts[place + 1].astype(np.int64)
        group = _permute(place, self._num_groups, self._key)
        first: Int64Array = np.maximum(start, lane_start)
        last: Int64Array = np.minimum(stop, lane_stop)
        keys = mix(group.astype(np.uint64) ^ self._key)
        begin: Int64Array = self._group_starts[group] + (first - start)
        if self._request_starts is None:
            return begin + _permute(ordered - first, last - first, keys)
        rows = np.empty_like(ordered)
        begins, places, number = np.unique(begin, return_index=True, return_inverse=True)
        for part, place in enumerate(places):
            mine = np.flatnonzero(number == part)
            size, offsets = int(last[place] - first[place]), ordered[mine] - first[mine]
            ends, moved = self._order_of_requests(int(begins[part]), size, int(keys[place]))
            rows[mine] = begins[part] + offsets + moved[np.searchsorted(ends, offsets, side="right")]
        return rows

    def _ordered_requests(self, begin: int, size: int, key: int) -> tuple[Int64Array, Int64Array]:
        """Return where each request of some rows ends in their new order, and how far its rows are moved back."""
        assert self._request_starts is not None
        inside = slice(*np.searchsorted(self._request_starts, [begin + 1, begin + size]))
        edges = np.concatenate([[0], self._request_starts[inside] - begin, [size]])
        order = _permute(np.arange(len(edges) - 1), len(edges) - 1, np.uint64(key))
        sizes = np.diff(edges)[order]
        ends = np.cumsum(sizes)
        return ends, edges[order] - (ends - sizes)

    def _permuted_starts(self) -> Starts:
        """Return where each place of the new sequence begins [G + 1]; made in parts, to hold little else."""
        assert self._key is not None
        dtype = np.uint32 if self._num_rows < 2**32 else np.int64
        starts: Starts = np.zeros(self._num_groups + 1, dtype=dtype)
        for begin in range(0, self._num_groups, _GROUPS_PER_BLOCK):
            places = np.arange(begin, min(begin + _GROUPS_PER_BLOCK, self._num_groups))
            group = _permute(places, self._num_groups, self._key)
            sizes = self._group_starts[group + 1] - self._group_starts[group]
            starts[places + 1] = starts[begin] + np.cumsum(sizes)
        return starts
