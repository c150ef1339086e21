"""What a night leaves of a table with dynamic ids: forgotten ids go, and a full column gets twice the rows.

A model is exported with it, so its next night begins with tables that have room. Rows move with all that is known of
them; what is free again has new values. Buckets stay together and double into two neighbours, as the leading bits of
a hash choose them, so the rows go from the checkpoint to the exported files some buckets at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from heterps_core.compute_device import CPU
from heterps_core.data.distinct_values import IdTurnover
from heterps_core.data.features import BUCKET_ROWS, FeatureSpec
from heterps_core.data.schema import MAX_TABLE_ROWS
from heterps_core.embeddings.id_index import HAS_ROW, ID_TENSORS, IdIndex, IdLayout
from heterps_core.embeddings.initial_rows import initial_rows
from heterps_core.embeddings.row_range import RowRange
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.training.storage.stored_tensors import DTYPES, StoredLayer, TensorRows, read_tensors

_MAX_LOAD = 0.75
"""Share of a column's rows in use; above, searches lengthen and buckets may be full: it gets twice the rows."""

_BLOCK_BUCKETS = 2_048
"""Moved at once: a million rows, about 100 MB with 16 floats."""


@dataclass(frozen=True, kw_only=True)
class StoredTable:
    """The rows of an embedding in a checkpoint.

    Shapes: R rows, D width.
    """

    run: RunDirectory
    layers: Sequence[StoredLayer]
    name: str
    embedding: SlotEmbedding
    kinds: Mapping[str, tuple[str, tuple[int, ...]]]
    """Type and shape of each tensor [R, ...] by its name in the table."""

    day: int
    """The day that was trained on."""

    time_to_live_days: int
    with_row_before: Mapping[str, int]
    """Ids with a row of the model that training began with, by the column; empty where it began with none."""

    def turnover(self) -> dict[int, IdTurnover]:
        """Return what becomes of the ids, by the first slot of a table."""
        features, found = self.embedding.features, {}
        for slot in self.embedding.tables:
            num_kept, num_evicted = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)
            for _, old in self._blocks(slot, only=("id_keys", "id_last_seen_day")):
                keys = old["id_keys"].numpy()
                is_kept, has_row = self._is_kept(old), keys & HAS_ROW > 0
                num_kept += [is_kept.sum(), (is_kept & has_row).sum()]
                is_evicted = (keys > 0) & ~is_kept
                num_evicted += [is_evicted.sum(), (is_evicted & has_row).sum()]
            found[slot] = IdTurnover(
                column=features.slot_names[slot],
                table_rows=features.slot_rows[slot],
                num_ids=int(num_kept[0]),
                num_with_row=int(num_kept[1]),
                num_admitted=int(num_kept[1] + num_evicted[1])
                - self.with_row_before.get(features.slot_names[slot], 0),
                num_evicted=int(num_evicted[0]),
            )
        return found

    def move(self, features: FeatureSpec, tensors: Mapping[str, Tensor], *, seed: int) -> None:
        """Write the rows of the ids that stay into new tensors, which are 0.

        Args:
            features: With a multiple of the rows for each slot.
            tensors: By their names in the table.
        """
        before, after = self._layout, IdLayout.of(features, self.embedding.slots)
        for slot in self.embedding.tables:
            factor = int(after.num_buckets_S[slot] // before.num_buckets_S[slot])
            for first_bucket, old in self._blocks(slot, only=tuple(tensors)):
                first = int(after.first_rows_S[slot]) + first_bucket * factor * BUCKET_ROWS
                rows = RowRange(first, first + factor * len(old["id_keys"]))
                new = {name: tensor[rows.first : rows.stop] for name, tensor in tensors.items()}
                initial_rows(
                    rows,
                    table=self.name,
                    dimension=self.embedding.dimension,
                    seed=seed,
                    standard_deviation=self.embedding.initial_standard_deviation,
                    out=new["weight"],
                )
                for name, tensor in new.items():
                    # Both rows that a shared row became are copies of it.
                    tensor[::BUCKET_ROWS] = old[name][::BUCKET_ROWS].repeat_interleave(factor, 0)
                kept = torch.from_numpy(np.flatnonzero(self._is_kept(old)))
                index = IdIndex(after, *(new[name] for name in ID_TENSORS), first_row=rows.first)
                ids_U = (old["id_keys"][kept] & ~HAS_ROW).numpy() - 1
                places = torch.from_numpy(index.insert(ids_U))
                for name, tensor in new.items():
                    tensor[places] = old[name][kept]

    @property
    def _layout(self) -> IdLayout:
        assert self.embedding.ids is not None
        return self.embedding.ids

    def _is_kept(self, tensors: Mapping[str, Tensor]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        last_seen, keys = tensors["id_last_seen_day"].numpy(), tensors["id_keys"].numpy()
        return (keys > 0) & (last_seen > self.day - self.time_to_live_days)

    def _blocks(self, slot: int, *, only: Sequence[str]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield the first bucket of each block of a slot, within it, and the block's rows of some tensors."""
        num_buckets = int(self._layout.num_buckets_S[slot])
        for first_bucket in range(0, num_buckets, _BLOCK_BUCKETS):
            first = int(self._layout.first_rows_S[slot]) + first_bucket * BUCKET_ROWS
            rows = RowRange(first, first + min(_BLOCK_BUCKETS, num_buckets - first_bucket) * BUCKET_ROWS)
            block = {
                name: torch.empty(
                    rows.num_rows, *self.kinds[name][1][1:], dtype=DTYPES[self.kinds[name][0]], device=CPU
                )
                for name in only
            }
            wanted = {
                f"{self.name}.{name}": TensorRows(tensor=tensor, rows=rows, num_rows=self._layout.num_rows)
                for name, tensor in block.items()
            }
            read_tensors(self.run, self.layers, wanted)
            yield first_bucket, block


def grown_features(
    features: FeatureSpec, turnovers: Sequence[Mapping[int, IdTurnover]], *, fixed: Mapping[str, int]
) -> tuple[FeatureSpec, tuple[IdTurnover, ...]]:
    """Return features with twice the rows for each column that is too full, and what became of each column's ids.

    Args:
        turnovers: Of each table, by the slot.
        fixed: Columns whose tables keep their size.
    """
    of_columns, slot_rows = [], list(features.slot_rows)
    for slot, name in enumerate(features.slot_names):
        of_slot = [turnover[slot] for turnover in turnovers if slot in turnover]
        if not of_slot:
            continue
        fullest = max(of_slot, key=lambda turnover: turnover.num_ids)
        if fullest.share_in_use > _MAX_LOAD and name not in fixed and 2 * slot_rows[slot] <= MAX_TABLE_ROWS:
            slot_rows[slot] *= 2
        of_columns.append(replace(fullest, table_rows=slot_rows[slot]))
    grown = tuple(slot_rows[table] for table in features.slot_tables)
    return replace(features, slot_rows=grown), tuple(of_columns)
