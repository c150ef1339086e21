"""The layer that turns categorical slots into vectors: it reads the batch too, unlike the other layers of a chain.

It puts its vectors beside the activation that it was given, so any cut of the chain has one tensor crossing.
Shapes: B rows of a (micro-)batch, S slots of the layer, D width of a vector, W width of the incoming activation.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from heterps_core.compute_device import CPU
from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import RowOptimizer
from heterps_core.embeddings.sharded_table import ShardedTable, SharedMemoryTable
from heterps_core.errors import ConfigurationError
from heterps_core.transport.shared_memory_link import SharedMemoryLink


class SlotEmbedding(nn.Module):
    """One table for several slots: output [B, W + S * D (+ dense features)].

    The rows are not made here but by `attach_table`, since only the owner of a shard may hold it.

    Args:
        features: Slots and dense features of the data.
        dimension: Width of a vector (D).
        slots: Indices of the slots to look up; all by default.
        rows_per_slot: Fold each slot into this many rows (row index modulo it); by default each slot has the
            rows that the data gave it.
        include_dense: Put the dense features beside the vectors.
        input_width: Width of the activation that comes in (W); 0 for the first layer of a chain.

    Example:
        >>> features = FeatureSpec(num_dense=13, slot_rows=(100,) * 26)
        >>> SlotEmbedding(features, dimension=16).output_width
        429
    """

    def __init__(
        self,
        features: FeatureSpec,
        *,
        dimension: int,
        slots: Sequence[int] | None = None,
        rows_per_slot: int | None = None,
        include_dense: bool = True,
        input_width: int = 0,
    ) -> None:
        super().__init__()
        self.slots = tuple(range(features.num_slots)) if slots is None else tuple(slots)
        out_of_range = [slot for slot in self.slots if not 0 <= slot < features.num_slots]
        if out_of_range or not self.slots:
            raise ConfigurationError(
                f"an embedding must look up at least one of the slots 0..{features.num_slots - 1} of the data, "
                f"got {list(self.slots)}"
            )
        self.dimension = dimension
        self.include_dense = include_dense
        self.rows_per_slot = rows_per_slot
        slot_rows = [rows_per_slot or features.slot_rows[slot] for slot in self.slots]
        self.num_rows = sum(slot_rows)
        self.input_width = input_width
        self.output_width = (
            input_width + len(self.slots) * dimension + (features.num_dense if include_dense else 0)
        )
        offsets = torch.tensor([0, *slot_rows[:-1]], device=CPU).cumsum(0)
        self.offsets_S: Tensor
        self.register_buffer("offsets_S", offsets, persistent=False)
        # Batches that are read ahead are still on the host, wherever the layer is.
        self._host_offsets_S = offsets
        self._reads_all_slots = self.slots == tuple(range(features.num_slots))
        self.table: ShardedTable | None = None

    def attach_table(self, table: ShardedTable) -> None:
        """Give the layer the rows that it looks up."""
        self.table = table

    def new_table(
        self,
        name: str,
        optimizer: RowOptimizer,
        *,
        seed: int,
        group: ProcessGroup | None = None,
        link: SharedMemoryLink | None = None,
        device: torch.device = CPU,
        rows_group: ProcessGroup | None = None,
    ) -> ShardedTable:
        """Make the shard of this process.

        With a `link` the replicas share one memory; `group` is None for one process.
        """
        table_class = (
            partial(ShardedTable, device=device, rows_group=rows_group)
            if link is None
            else partial(SharedMemoryTable, link=link)
        )
        return table_class(
            name=name,
            num_rows=self.num_rows,
            dimension=self.dimension,
            optimizer=optimizer,
            seed=seed,
            initial_standard_deviation=self.dimension**-0.5 / 10,
            group=group,
        )

    def row_numbers(self, batch: ClickBatch) -> Tensor:
        """Return the rows of the table [B, S] that a batch looks up."""
        ids_BS = batch.ids if self._reads_all_slots else batch.ids[:, list(self.slots)]
        if self.rows_per_slot is not None:
            ids_BS = ids_BS % self.rows_per_slot
        is_ahead = ids_BS.device != self.offsets_S.device
        return ids_BS + (self._host_offsets_S if is_ahead else self.offsets_S)

    def forward(
        self, batch: ClickBatch, activation_BW: Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return [B, output_width] of type `dtype`: incoming activation, vectors in slot order, dense features."""
        if self.table is None:
            raise RuntimeError("attach_table must come before the first forward pass")
        dense = batch.dense if self.include_dense else None
        return self.table.lookup(self.row_numbers(batch), activation_BW, dense, dtype=dtype)


def add_tower(
    layers: MutableMapping[str, nn.Module], width: int, hidden_widths: Sequence[int], *, prefix: str = ""
) -> int:
    """Add pairs of a fully connected layer and ReLU to a chain; returns the width that leaves the last."""
    for number, hidden in enumerate(hidden_widths, start=1):
        layers[f"{prefix}fc{number}"] = nn.Linear(width, hidden)
        layers[f"{prefix}relu{number}"] = nn.ReLU()
        width = hidden
    return width


class TailLinear(nn.Module):
    """Passes the first `kept_width` columns through and applies a linear layer to the rest."""

    def __init__(self, kept_width: int, tail_width: int, output_width: int) -> None:
        super().__init__()
        self.kept_width = kept_width
        self.linear = nn.Linear(tail_width, output_width)

    def forward(self, activation_BW: Tensor) -> Tensor:
        """Return [B, kept_width + output_width]."""
        kept, tail = activation_BW[:, : self.kept_width], activation_BW[:, self.kept_width :]
        return torch.cat([kept, self.linear(tail)], 1)
