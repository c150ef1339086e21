"""The layer that turns categorical slots into vectors: it reads the batch too, unlike the other layers of a chain.

It puts its vectors beside the activation that it was given, so any cut of the chain has one tensor crossing.
Shapes: B rows of a (micro-)batch, S slots of the layer, K ids of these slots, D width of a vector, W width of the
incoming activation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from heterps_core.compute_device import CPU
from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import NO_ID, SEQUENCE, FeatureSpec
from heterps_core.embeddings.bags import Bags
from heterps_core.embeddings.id_index import IdLayout
from heterps_core.embeddings.row_optimizers import RowOptimizer
from heterps_core.embeddings.row_range import shard_rows
from heterps_core.embeddings.sequence_columns import SequenceColumns
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.embeddings.shared_memory_table import SharedMemoryTable
from heterps_core.embeddings.swept.sweep_memory import ShardSize
from heterps_core.embeddings.swept.swept_table import ColdRowsPlace, SweptTable
from heterps_core.errors import ConfigurationError
from heterps_core.models.graph_block import LiveTensor
from heterps_core.transport.shared_memory_link import SharedMemoryLink
from heterps_core.units import BYTES_PER_FLOAT32


class SlotEmbedding(nn.Module):
    """One table for several slots: output [B, W + S * D (+ dense features)]; the values of a list are pooled.

    Where it keeps sequences, they stand after all other slots: each has the vectors of its values side by side, zeros
    after its end, and the lengths of all stand in front of the dense features. Packed, there are no zeros, and the
    output is narrower: see `SequenceColumns`.

    The rows are not made here but by `attach_table`, since only the owner of a shard may hold it.

    Args:
        features: Slots and dense features of the data.
        dimension: Width of a vector (D).
        slots: Indices of the slots to look up; all by default. Those of one table share its rows.
        rows_per_slot: Fold each slot into this many rows (row index modulo it); by default each slot has the
            rows that the data gave it.
        include_dense: Put the dense features beside the vectors.
        input_width: Width of the activation that comes in (W); 0 for the first layer of a chain.
        keeps_sequences: Return the vectors of sequences in order; by default their mean.
        packs_sequences: Return them without padding, for layers that read them by `sequence_columns`.
        initial_standard_deviation: Of the values of new rows; by default a tenth of D to the power of -1/2.

    Attributes:
        vector_columns: Of the output, for each of the slots, those of its vectors.
        tables: The first slot of each table that is looked up.
        sequences: Positions in `slots` of the sequences that are kept.
        inputs, outputs: In the chain of a traced model, what enters and what leaves; else empty.

    Example:
        >>> features = FeatureSpec(num_dense=13, slot_rows=(100,) * 26)
        >>> SlotEmbedding(features, dimension=16).output_width
        429
    """

    own_optimizer: ClassVar[type[RowOptimizer] | None] = None
    """Of a layer with rows that the embedding optimizer of a training must not change."""

    def __init__(
        self,
        features: FeatureSpec,
        *,
        dimension: int,
        slots: Sequence[int] | None = None,
        rows_per_slot: int | None = None,
        include_dense: bool = True,
        input_width: int = 0,
        keeps_sequences: bool = False,
        packs_sequences: bool = False,
        initial_standard_deviation: float | None = None,
    ) -> None:
        super().__init__()
        self.slots = tuple(range(features.num_slots)) if slots is None else tuple(slots)
        out_of_range = [slot for slot in self.slots if not 0 <= slot < features.num_slots]
        if out_of_range or not self.slots:
            raise ConfigurationError(
                f"an embedding must look up at least one of the slots 0..{features.num_slots - 1} of the data, "
                f"got {list(self.slots)}"
            )
        self.features = features
        self.dimension = dimension
        self.include_dense = include_dense
        self.rows_per_slot = rows_per_slot
        self.initial_standard_deviation = (
            dimension**-0.5 / 10 if initial_standard_deviation is None else initial_standard_deviation
        )
        tables = [features.slot_tables[slot] for slot in self.slots]
        self.tables = tuple(dict.fromkeys(tables))
        table_rows = [rows_per_slot or features.slot_rows[table] for table in self.tables]
        self.num_rows = sum(table_rows)
        if features.dynamic_ids is not None and rows_per_slot is not None:
            raise ConfigurationError(
                f"with dynamic ids the number of values gives a table its rows, but a layer asks for {rows_per_slot} "
                f"for each slot; leave dynamic_ids out of the schema, or take another model"
            )
        self.input_width = input_width
        lengths = [features.slot_lengths[slot] for slot in self.slots]
        poolings = [features.slot_poolings[slot] for slot in self.slots]
        self.sequences = [
            place for place, pooling in enumerate(poolings) if keeps_sequences and pooling == SEQUENCE
        ]
        pooled = [place for place in range(len(lengths)) if place not in self.sequences]
        in_order = pooled + self.sequences
        ends = accumulate((lengths[place] if place in self.sequences else 1 for place in in_order), initial=0)
        of_places = dict(zip(in_order, pairwise(ends), strict=True))
        self.vector_columns = [
            range(*(input_width + dimension * end for end in of_places[place]))
            for place in range(len(lengths))
        ]
        self.bags = None
        if max(lengths) > 1 or self.sequences:
            self.bags = Bags([lengths[place] for place in pooled], [poolings[place] for place in pooled])
        self.sequence_columns = SequenceColumns(
            before=input_width + len(pooled) * dimension,
            lengths=tuple(lengths[place] for place in self.sequences),
            dimension=dimension,
            after=features.num_dense if include_dense else 0,
            histories=_by_history([features.slot_histories[self.slots[place]] for place in self.sequences]),
        )
        self.packs_sequences = packs_sequences and bool(self.sequences)
        self.output_width = self.sequence_columns.padded_width
        self.id_columns = [column for place in in_order for column in features.id_columns[self.slots[place]]]
        first_rows = dict(zip(self.tables, accumulate(table_rows, initial=0), strict=False))
        offsets = torch.tensor([first_rows[tables[place]] for place in in_order], device=CPU)
        offsets = offsets.repeat_interleave(torch.tensor([lengths[place] for place in in_order], device=CPU))
        self.offsets_K: Tensor
        self.register_buffer("offsets_K", offsets, persistent=False)
        # Batches that are read ahead are still on the host, wherever the layer is.
        self._host_offsets_K = offsets
        self._reads_all_ids = self.id_columns == list(range(features.num_ids))
        self.ids = None if features.dynamic_ids is None else IdLayout.of(features, self.slots)
        self.table: ShardedTable | None = None
        self.inputs: tuple[LiveTensor, ...] = ()
        self.outputs: tuple[LiveTensor, ...] = ()

    def in_chain(self, inputs: Sequence[LiveTensor], outputs: Sequence[LiveTensor]) -> SlotEmbedding:
        """Return this layer as one of a traced model's chain, in which `inputs` pass it."""
        placed = copy.deepcopy(self)
        placed.inputs, placed.outputs = tuple(inputs), tuple(outputs)
        placed.input_width = sum(value.width for value in inputs)
        placed.output_width += placed.input_width
        return placed

    def example(
        self, num_rows: int, lengths: Sequence[int] = (), rows_per_list: Sequence[int] = ()
    ) -> Tensor:
        """Return zeros in the form of the output.

        Packed sequences have these lengths, and are each of as many rows, by default 1.
        """
        if self.packs_sequences:
            ones = [1] * len(self.sequences)
            return self.sequence_columns.example(num_rows, lengths or ones, rows_per_list or ones)
        return torch.zeros(num_rows, self.output_width, device=CPU)

    def attach_table(self, table: ShardedTable) -> None:
        """Give the layer the rows that it looks up."""
        self.table = table

    def shard_size(
        self, optimizer: type[RowOptimizer], *, batch_size: int, num_shards: int, shard: int
    ) -> ShardSize:
        """Return what decides how much memory a shard of the table gets.

        Args:
            batch_size: Samples of a step over all replicas.
        """
        num_rows = shard_rows(self.num_rows, num_shards, shard).num_rows
        state_bytes = self.state_bytes_per_row(optimizer)
        return ShardSize(
            num_rows=num_rows,
            width=self.dimension + state_bytes // BYTES_PER_FLOAT32,
            most_rows=min(batch_size * len(self.id_columns), num_rows),
        )

    def state_bytes_per_row(self, optimizer: type[RowOptimizer]) -> int:
        """Return the bytes of a row's state, where a training has that embedding optimizer."""
        return (self.own_optimizer or optimizer).state_bytes_per_row(self.dimension)

    def new_table(
        self,
        name: str,
        optimizer: RowOptimizer,
        *,
        link: SharedMemoryLink | None = None,
        cold_rows: ColdRowsPlace | None = None,
        device: torch.device = CPU,
        **others: Any,
    ) -> ShardedTable:
        """Make the shard of this process.

        With a `link` the replicas share one memory. With a place for cold rows not all rows are in memory. Neither
        goes with dynamic ids. All else is what `ShardedTable` takes.

        Raises:
            ConfigurationError: The table would be on a device, and ids are dynamic.
        """
        if self.ids is not None and device != CPU:
            raise ConfigurationError(
                f"dynamic ids are for tables in the host's memory, but that of {name} would be on {device}; "
                f"place it on a CPU, or leave dynamic_ids out of the schema"
            )
        table_class: Callable[..., ShardedTable] = ShardedTable
        if cold_rows is not None:
            table_class = partial(SweptTable, place=cold_rows)
        elif link is not None:
            table_class = partial(SharedMemoryTable, link=link)
        return table_class(
            name=name,
            num_rows=self.num_rows,
            dimension=self.dimension,
            optimizer=optimizer if self.own_optimizer is None else self.own_optimizer(),
            initial_standard_deviation=self.initial_standard_deviation,
            device=device,
            bags=self.bags,
            ids=self.ids,
            **others,
        )

    def row_numbers(self, batch: ClickBatch) -> Tensor:
        """Return the rows of the table [B, K] that a batch looks up, or dynamic ids; `NO_ID` after a list's end."""
        ids_BK = batch.ids if self._reads_all_ids else batch.ids[:, self.id_columns]
        if self.ids is not None:
            return ids_BK
        is_ahead = ids_BK.device != self.offsets_K.device
        folded_BK = ids_BK if self.rows_per_slot is None else ids_BK % self.rows_per_slot
        rows_BK = folded_BK + (self._host_offsets_K if is_ahead else self.offsets_K)
        return rows_BK if self.bags is None else rows_BK.masked_fill_(ids_BK == NO_ID, NO_ID)

    def forward(
        self, batch: ClickBatch, activation_BW: Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return [B, output_width] of type `dtype`: incoming activation, vectors in slot order, dense features."""
        if self.table is None:
            raise RuntimeError("attach_table must come before the first forward pass")
        after_BV = batch.dense if self.include_dense else None
        if self.sequences:
            is_there_BK = batch.ids != NO_ID
            columns = [self.features.id_columns[self.slots[place]] for place in self.sequences]
            lengths = [is_there_BK[:, each.start : each.stop].sum(1, keepdim=True) for each in columns]
            after_BV = torch.cat(
                [each.to(dtype) for each in lengths] + ([] if after_BV is None else [after_BV]), 1
            )
        rows_BK = None if self.table.is_announced else self.row_numbers(batch)
        packs = self.packs_sequences
        return self.table.lookup(rows_BK, activation_BW, after_BV, dtype=dtype, packs=packs)


def share_sequences(layers: Iterable[nn.Module]) -> bool:
    """Tell whether, for all layers that look sequences up, a row without values may have those of the row before."""
    return all(
        layer.packs_sequences
        for layer in layers
        if isinstance(layer, SlotEmbedding)
        and any(layer.features.slot_poolings[slot] == SEQUENCE for slot in layer.slots)
    )


def _by_history(histories: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of each history, by their own number.

    Example:
        >>> _by_history([3, 4, 3])
        ((0, 2), (1,))
    """
    return tuple(
        tuple(place for place, own in enumerate(histories) if own == history)
        for history in dict.fromkeys(histories)
    )


def add_tower(
    layers: MutableMapping[str, nn.Module],
    width: int,
    hidden_widths: Sequence[int],
    *,
    dropout: float = 0.0,
) -> int:
    """Add fully connected layers, a ReLU and dropout after each, to a chain; returns the width that leaves."""
    for number, hidden in enumerate(hidden_widths, start=1):
        layers[f"fc{number}"] = nn.Linear(width, hidden)
        layers[f"relu{number}"] = nn.ReLU()
        if dropout:
            layers[f"dropout{number}"] = nn.Dropout(dropout)
        width = hidden
    return width
