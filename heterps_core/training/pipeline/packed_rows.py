"""Messages of rows with packed sequences: the lengths of each row, from which the size of the rest follows.

Shapes: B rows, S sequences, W columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heterps_core.compute_device import CPU
from heterps_core.embeddings.sequence_columns import SequenceColumns


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows after an embedding that packs its sequences, or their gradients."""

    columns: SequenceColumns
    dtype: torch.dtype
    """Of the rows in a message; the lengths are int32."""

    def message(self, rows_BW: Tensor, counts_BS: Tensor, first: int, stop: int) -> Tensor:
        """Return rows first..stop - 1 as bytes on the host."""
        part = self.columns.part(rows_BW, counts_BS, first, stop).to(self.dtype)
        of_part = (counts_BS[first:stop].int(), part)
        return torch.cat([each.reshape(-1).view(torch.uint8) for each in of_part]).to(CPU)

    def head_bytes(self, num_rows: int) -> int:
        """Return the bytes at the start of a message from which its size follows."""
        return torch.int32.itemsize * num_rows * len(self.columns.lengths)

    def message_bytes(self, head: Tensor, num_rows: int) -> int:
        """Return the bytes of a message with this head."""
        width = self.columns.width(self._counts(head, num_rows))
        return len(head) + num_rows * width * self.dtype.itemsize

    def rows(self, messages: Sequence[Tensor], num_rows: Sequence[int]) -> Tensor:
        """Return the rows of messages, one after the other, [B, W] in float32."""
        counts, parts = [], []
        for message, size in zip(messages, num_rows, strict=True):
            first = self.head_bytes(size)
            counts.append(self._counts(message[:first], size))
            parts.append(message[first:].view(self.dtype).view(size, -1))
        if not parts:
            return torch.empty(0, self.columns.padded_width)
        rows_BW = self.columns.joined(parts, counts).float()
        if self.dtype is not torch.float32:
            self.columns.write_counts(rows_BW, torch.cat(counts))
        return rows_BW

    def _counts(self, head: Tensor, num_rows: int) -> Tensor:
        return head.view(torch.int32).view(num_rows, len(self.columns.lengths)).long()
