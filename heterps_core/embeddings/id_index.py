"""The row of a table for each dynamic id: a hash table with a place for each row.

The leading bits of an id's hash choose a bucket of its slot, of which an id may have any row but the first. The first
is shared by the ids of the bucket that have no row: they were not seen often enough, or the bucket is full. Inside a
bucket ids are probed one after the other, as in TorchRec's multi-probe zero-collision hash (MPZCH), so no two ids
have one row. New ids are inserted in ascending order: how many replicas saw them changes nothing.

Shapes: S slots of the data, R rows of a shard, N ids, U different ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heterps_core.compute_device import CPU
from heterps_core.data.features import BUCKET_ROWS, NO_ID, FeatureSpec
from heterps_core.embeddings.row_kernels import compiled_functions

HAS_ROW = 1 << 62
"""Bit of a key: the id was seen often enough to read and train its row."""

ID_TENSORS = ("id_keys", "id_sightings", "id_last_seen_day")
"""Names in checkpoints and exported models; see `IdIndex`."""

_SHARED = -1
"""In the place of a key, at the first row of a bucket."""

_UNKNOWN = -2
"""In the place of the row of an id that was not seen often enough."""

_GROUP_ROWS = 8
_NUM_GROUPS = BUCKET_ROWS // _GROUP_ROWS
_BUCKET_BITS = 32

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class IdLayout:
    """Rows of a table that belong to the ids of each slot, in the order of slots."""

    hash_bits: int
    min_sightings: int
    first_rows_S: Int64Array
    """-1 for slots that the table does not look up, or by the ids of an earlier slot."""

    num_buckets_S: Int64Array

    @classmethod
    def of(cls, features: FeatureSpec, slots: Sequence[int]) -> IdLayout:
        """Return the layout of a table for some slots of data with dynamic ids."""
        assert features.dynamic_ids is not None
        first_rows = np.full(features.num_slots, -1)
        num_buckets = np.zeros(features.num_slots, dtype=np.int64)
        own = sorted({features.slot_tables[slot] for slot in slots})
        num_buckets[own] = np.array(features.slot_rows)[own] // BUCKET_ROWS
        first_rows[own] = (np.cumsum(num_buckets) - num_buckets)[own] * BUCKET_ROWS
        return cls(features.hash_bits, features.dynamic_ids.min_sightings, first_rows, num_buckets)

    @property
    def num_rows(self) -> int:
        """Rows of the whole table."""
        return int(self.num_buckets_S.sum()) * BUCKET_ROWS

    def bucket_rows(self, ids_N: Int64Array) -> Int64Array:
        """Return the first row of the bucket of each id; ids in ascending order have ascending ones.

        Raises:
            IndexError: An id is of a slot that the table does not look up.
        """
        slots_N = ids_N >> self.hash_bits
        is_slot_N = (slots_N >= 0) & (slots_N < len(self.first_rows_S))
        if not is_slot_N.all() or (self.first_rows_S[slots_N] < 0).any():
            own = np.flatnonzero(self.first_rows_S >= 0).tolist()
            raise IndexError(f"ids must be of slots {own}, got some of {np.unique(slots_N).tolist()}")
        leading_N = (ids_N & ((1 << self.hash_bits) - 1)) >> (self.hash_bits - _BUCKET_BITS)
        buckets_N = leading_N * self.num_buckets_S[slots_N] >> _BUCKET_BITS
        rows_N: Int64Array = self.first_rows_S[slots_N] + buckets_N * BUCKET_ROWS
        return rows_N


class IdIndex:
    """The ids of a shard.

    Args:
        layout: Of the whole table.
        keys_R: int64; one more than the id of each row, with `HAS_ROW`, or 0 where a row is free.
        sightings_R: int32; how often each id was seen, up to what gives it its row.
        last_seen_day_R: int32.
        first_row: Of the shard.
        day: On which ids are seen now.
    """

    def __init__(
        self,
        layout: IdLayout,
        keys_R: Tensor,
        sightings_R: Tensor,
        last_seen_day_R: Tensor,
        *,
        first_row: int = 0,
        day: int = 0,
    ) -> None:
        self.layout = layout
        self.keys_R, self.sightings_R, self.last_seen_day_R = keys_R, sightings_R, last_seen_day_R
        self._first_row, self._day = first_row, day
        self._described = _Index(
            keys_R.data_ptr(),
            first_row,
            len(keys_R),
            layout.first_rows_S.ctypes.data,
            layout.num_buckets_S.ctypes.data,
            len(layout.first_rows_S),
            layout.hash_bits,
        )

    @classmethod
    def empty(cls, layout: IdLayout, *, num_rows: int, first_row: int = 0, day: int = 0) -> IdIndex:
        """Return the index of a shard of whole buckets, without ids."""
        keys_R = torch.zeros(num_rows, dtype=torch.int64, device=CPU)
        keys_R[::BUCKET_ROWS] = _SHARED
        counts = [torch.zeros(num_rows, dtype=torch.int32, device=CPU) for _ in range(2)]
        return cls(layout, keys_R, *counts, first_row=first_row, day=day)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by their names in a checkpoint; the first size of each is the rows of the shard."""
        return dict(zip(ID_TENSORS, (self.keys_R, self.sightings_R, self.last_seen_day_R), strict=True))

    def rows(self, ids: Tensor, found: Tensor | None = None) -> Tensor:
        """Return the row in the shard of each id; the first one of its bucket where it has none of its own.

        Args:
            ids: int64 of any shape, `NO_ID` where there is none, whose row is `NO_ID` too.
            found: What `find` said of them before, which is written to; ids keep the rows that they had then.

        Raises:
            IndexError: An id is not of this shard.
        """
        if found is None:
            return self.find(ids, tells_unknown=False)
        is_unknown = found == _UNKNOWN
        found[is_unknown] = self.find(ids[is_unknown], tells_unknown=False)
        return found

    def rows_seen(self, ids: Tensor, changed_R: Tensor, found: Tensor | None = None) -> Tensor:
        """Return what `rows` does, and count that ids without a row were seen: each different one once.

        Args:
            changed_R: Bool; True is written for each row that an id is given or comes nearer to.
            found: As of `rows`.
        """
        rows = self.find(ids) if found is None else found
        of_all = rows.view(-1).numpy()
        unknown_N = np.flatnonzero(of_all == _UNKNOWN)
        if len(unknown_N):
            ids_U, place_N = np.unique(ids.reshape(-1).numpy()[unknown_N], return_inverse=True)
            rows_U = (
                self.find(torch.from_numpy(ids_U)).numpy()
                if found is not None
                else np.full(len(ids_U), _UNKNOWN)
            )
            is_new_U = rows_U == _UNKNOWN
            rows_U[is_new_U] = self._sight(ids_U[is_new_U], changed_R.numpy())
            of_all[unknown_N] = rows_U[place_N]
        return rows

    def note_seen(self, rows_U: Tensor) -> None:
        """Note for some rows of the shard that their ids were seen on the day of now."""
        self.last_seen_day_R[rows_U] = self._day

    def insert(self, ids_U: Int64Array) -> Int64Array:
        """Give different ids a row in their order, where they have none, and return the rows in the shard [U].

        It is `NO_ID` where the bucket is full.
        """
        ids_U = np.ascontiguousarray(ids_U)
        kernels = compiled_functions(_declare)
        if kernels is None:
            return np.array([self._insert_one(id_) for id_ in ids_U.tolist()], dtype=np.int64)
        rows_U = np.empty_like(ids_U)
        kernels.heterps_insert_ids(byref(self._described), ids_U.ctypes.data, len(ids_U), rows_U.ctypes.data)
        return rows_U

    def _sight(self, ids_U: Int64Array, changed_R: npt.NDArray[np.bool_]) -> Int64Array:
        """Count that ids were seen, and return the rows that they read now."""
        rows_U, keys_R, sightings_R = self.insert(ids_U), self.keys_R.numpy(), self.sightings_R.numpy()
        placed = rows_U[rows_U != NO_ID]
        sightings_R[placed] += 1
        self.last_seen_day_R.numpy()[placed] = self._day
        changed_R[placed] = True
        admitted = placed[sightings_R[placed] >= self.layout.min_sightings]
        keys_R[admitted] |= HAS_ROW
        has_row_U = (rows_U != NO_ID) & (keys_R[rows_U] & HAS_ROW > 0)
        return np.where(has_row_U, rows_U, self.layout.bucket_rows(ids_U) - self._first_row)

    def find(self, ids: Tensor, *, tells_unknown: bool = True) -> Tensor:
        """Return what `rows` and `rows_seen` can begin with; another thread may insert ids meanwhile.

        Args:
            tells_unknown: Ids without a row get a mark, in the place of the first row of their bucket.

        Raises:
            IndexError: An id is not of this shard.
        """
        ids = ids.contiguous()
        rows = torch.empty_like(ids)
        kernels = compiled_functions(_declare)
        if kernels is None:
            rows.view(-1).numpy()[:] = self._find_by_numpy(ids.view(-1).numpy(), tells_unknown=tells_unknown)
            return rows
        bad = kernels.heterps_find_ids(
            byref(self._described), ids.data_ptr(), ids.numel(), tells_unknown, rows.data_ptr()
        )
        if bad >= 0:
            raise self._not_here(int(ids.view(-1)[bad]))
        return rows

    def _find_by_numpy(self, ids_N: Int64Array, *, tells_unknown: bool) -> Int64Array:
        rows_N = np.full(len(ids_N), NO_ID)
        is_id_N = ids_N != NO_ID
        ids_N, keys_R = ids_N[is_id_N], self.keys_R.numpy()
        buckets_N = self._buckets_here(ids_N)
        found_N = np.full(len(ids_N), _UNKNOWN) if tells_unknown else buckets_N.copy()
        remaining = np.arange(len(ids_N))
        for step in range(_NUM_GROUPS):
            groups = buckets_N[remaining] + (ids_N[remaining] + step) % _NUM_GROUPS * _GROUP_ROWS
            keys_NG = keys_R[groups[:, None] + np.arange(_GROUP_ROWS)]
            is_own_NG = keys_NG == (ids_N[remaining, None] + 1 | HAS_ROW)
            is_found = is_own_NG.any(1)
            found_N[remaining[is_found]] = (groups + is_own_NG.argmax(1))[is_found]
            remaining = remaining[~is_found & (keys_NG != 0).all(1)]
        rows_N[is_id_N] = found_N
        return rows_N

    def _insert_one(self, id_: int) -> int:
        keys_R = self.keys_R.numpy()
        (bucket,) = self._buckets_here(np.array([id_])).tolist()
        for step in range(_NUM_GROUPS):
            first = bucket + (id_ + step) % _NUM_GROUPS * _GROUP_ROWS
            group = keys_R[first : first + _GROUP_ROWS]
            for places in (group & ~HAS_ROW == id_ + 1, group == 0):
                if places.any():
                    group[places.argmax()] |= id_ + 1
                    return int(first + places.argmax())
        return NO_ID

    def _buckets_here(self, ids_N: Int64Array) -> Int64Array:
        buckets_N = self.layout.bucket_rows(ids_N) - self._first_row
        for id_ in ids_N[(buckets_N < 0) | (buckets_N >= len(self.keys_R))][:1].tolist():
            raise self._not_here(id_)
        return buckets_N

    def _not_here(self, id_: int) -> IndexError:
        return IndexError(f"id {id_} is out of range for a table shard of {len(self.keys_R)} rows")


class _Index(ctypes.Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("first_row", c_int64),
        ("num_rows", c_int64),
        ("first_rows", c_void_p),
        ("num_buckets", c_void_p),
        ("num_slots", c_int64),
        ("hash_bits", c_int64),
    )


def _declare(library: ctypes.CDLL) -> None:
    library.heterps_find_ids.argtypes = (POINTER(_Index), c_void_p, c_int64, c_int64, c_void_p)
    library.heterps_find_ids.restype = c_int64
    library.heterps_insert_ids.argtypes = (POINTER(_Index), c_void_p, c_int64, c_void_p)
    library.heterps_insert_ids.restype = None
