"""Sequences in the output of an embedding: the vectors of a batch's values without padding, and where each row's are.

An activation is [B, W]: columns of every row, then the values of sequences, then columns of every row again, of which
the lengths of the sequences come first. Padded, each row has its own values side by side, zeros after the end of each
sequence. Packed, the values of all rows follow one another, row by row, through all of the middle, so that W follows
from the sum of the lengths; rows of full sequences are the same in both. A row without a value has the sequence of
the row before it, as the candidates of a request have.

Shapes: B rows, S sequences, T most values of a sequence, N values of a batch, D width of a vector, W columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from heterps_core.compute_device import CPU


def packed_width(num_values: int, num_rows: int, *, dimension: int, most: int) -> int:
    """Return the columns that hold the vectors of a batch: `most`, those of padded sequences, if all are there."""
    if num_values * dimension == num_rows * most:
        return most
    width = -(-num_values * dimension // num_rows)
    # One column more tells them from padded ones.
    return width + (width == most)


def place_values(vectors_ND: Tensor, middle_BX: Tensor, is_there_BT: Tensor) -> None:
    """Write the vectors of a batch into the middle of an activation.

    Args:
        middle_BX: Packed, or padded if it has D columns for each value that a row may have.
        is_there_BT: Which of these values each row has.
    """
    width, dimension = middle_BX.shape[1], vectors_ND.shape[1]
    if width == is_there_BT.shape[1] * dimension:
        padded = middle_BX.new_zeros(*is_there_BT.shape, dimension)
        padded[is_there_BT] = vectors_ND.to(padded.dtype)
        middle_BX.copy_(padded.flatten(1))
    else:
        flat, num_full = vectors_ND.flatten(), vectors_ND.numel() // max(width, 1)
        middle_BX[:num_full] = flat[: num_full * width].view(num_full, width)
        middle_BX[num_full:] = 0
        middle_BX[num_full : num_full + 1, : len(flat) - num_full * width] = flat[num_full * width :]


def values_in(middle_BX: Tensor, is_there_BT: Tensor, dimension: int) -> Tensor:
    """Return the vectors of a batch [N, D] that `place_values` wrote, or their gradients."""
    num_rows, num_places = is_there_BT.shape
    if middle_BX.shape[1] == num_places * dimension:
        return middle_BX.reshape(num_rows, num_places, dimension)[is_there_BT]
    num_values = int(is_there_BT.sum())
    return middle_BX.reshape(-1)[: num_values * dimension].view(num_values, dimension)


@dataclass(frozen=True, slots=True)
class SequenceColumns:
    """Where the sequences of an activation are."""

    before: int
    """Columns before the values."""

    lengths: tuple[int, ...]
    """Most values of each sequence (T)."""

    dimension: int
    after: int
    """Columns after the lengths."""

    histories: tuple[tuple[int, ...], ...]
    """Sequences with values of the same events."""

    @property
    def padded_width(self) -> int:
        """Columns of an activation with padded sequences."""
        return self.before + sum(self.lengths) * self.dimension + len(self.lengths) + self.after

    def is_padded(self, activation_BW: Tensor) -> bool:
        """Tell whether each row has its own values side by side."""
        return activation_BW.shape[1] == self.padded_width

    def counts(self, activation_BW: Tensor) -> Tensor:
        """Return the lengths of all sequences [B, S], int64."""
        stop = activation_BW.shape[1] - self.after
        return activation_BW[:, stop - len(self.lengths) : stop].detach().long()

    def without_values(self, activation_BW: Tensor) -> Tensor:
        """Return the columns that are no values or lengths, side by side."""
        # From the end: a trace would keep the width that it was made with.
        right = slice(-self.after, None) if self.after else slice(0)
        return torch.cat([activation_BW[:, : self.before], activation_BW[:, right]], 1)

    def padded(self, activation_BW: Tensor, place: int) -> Tensor:
        """Return the values of a sequence of padded ones [B, T, D]."""
        first = self.before + sum(self.lengths[:place]) * self.dimension
        stop = first + self.lengths[place] * self.dimension
        return torch.unflatten(activation_BW[:, first:stop], 1, (self.lengths[place], self.dimension))

    def values(self, activation_BW: Tensor) -> Tensor:
        """Return all values of packed sequences [M, D], perhaps with zeros after the last."""
        flat = self._middle(activation_BW).reshape(-1)
        return flat[: len(flat) // self.dimension * self.dimension].view(-1, self.dimension)

    def example(self, num_rows: int, lengths: Sequence[int], rows_per_list: Sequence[int]) -> Tensor:
        """Return an activation of zeros with sequences of these lengths, each of as many rows."""
        is_first = torch.arange(num_rows, device=CPU)[:, None] % torch.tensor(rows_per_list, device=CPU) == 0
        counts_BS = torch.tensor(lengths, device=CPU) * is_first
        activation_BW = torch.zeros(num_rows, self.width(counts_BS), device=CPU)
        self.write_counts(activation_BW, counts_BS)
        return activation_BW

    def width(self, counts_BS: Tensor) -> int:
        """Return the columns of an activation with packed sequences of these lengths."""
        middle = packed_width(
            int(counts_BS.sum()),
            len(counts_BS),
            dimension=self.dimension,
            most=sum(self.lengths) * self.dimension,
        )
        return self.before + middle + len(self.lengths) + self.after

    def part(self, activation_BW: Tensor, counts_BS: Tensor, first: int, stop: int) -> Tensor:
        """Return rows first..stop - 1, or their gradients, without the values of others."""
        if (first, stop) == (0, len(activation_BW)):
            return activation_BW
        firsts = [0, *accumulate(counts_BS.sum(1).tolist())]
        values_ND = self._values_there(activation_BW, counts_BS)[firsts[first] : firsts[stop]]
        return self._built(activation_BW[first:stop], values_ND, counts_BS[first:stop])

    def joined(self, parts: Sequence[Tensor], counts: Sequence[Tensor]) -> Tensor:
        """Return the rows of parts, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        values = [self._values_there(*part) for part in zip(parts, counts, strict=True)]
        num_right = len(self.lengths) + self.after
        fixed = [
            torch.cat([part[:, : self.before], part[:, part.shape[1] - num_right :]], 1) for part in parts
        ]
        return self._built(torch.cat(fixed), torch.cat(values), torch.cat(list(counts)))

    def write_counts(self, activation_BW: Tensor, counts_BS: Tensor) -> None:
        """Write the lengths of all sequences."""
        stop = activation_BW.shape[1] - self.after
        activation_BW[:, stop - len(self.lengths) : stop] = counts_BS

    def _values_there(self, activation_BW: Tensor, counts_BS: Tensor) -> Tensor:
        """Return the values of all rows [N, D]."""
        return values_in(self._middle(activation_BW), self._is_there(counts_BS), self.dimension)

    def _middle(self, activation_BW: Tensor) -> Tensor:
        """Return the columns of values."""
        return activation_BW[:, self.before : activation_BW.shape[1] - self.after - len(self.lengths)]

    def _is_there(self, counts_BS: Tensor) -> Tensor:
        """Return which of the values that a row may have are there [B, T of all sequences]."""
        places = [torch.arange(length, device=counts_BS.device) for length in self.lengths]
        return torch.cat([own < counts_BS[:, each, None] for each, own in enumerate(places)], 1)

    def _built(self, columns_BW: Tensor, values_ND: Tensor, counts_BS: Tensor) -> Tensor:
        """Return an activation of these values, and of the columns before and after them of another one."""
        num_right = len(self.lengths) + self.after
        left, right = columns_BW[:, : self.before], columns_BW[:, columns_BW.shape[1] - num_right :]
        middle = left.new_empty(len(left), self.width(counts_BS) - self.before - num_right)
        place_values(values_ND, middle, self._is_there(counts_BS))
        return torch.cat([left, middle, right], 1)


def rounded_lengths(counts: Tensor, *, most: int) -> Tensor:
    """Return lengths to which rows are padded so that rows of one length are encoded together.

    They have three leading bits and are at least 16, so a tenth is padding in the mean, and a row's own length alone
    decides with how many zeros it is encoded.

    Example:
        >>> rounded_lengths(torch.tensor([3, 17, 100, 900]), most=1_000).tolist()
        [16, 20, 112, 1000]
    """
    step = 2 ** (counts.clamp(min=16).log2().floor().long() - 2)
    return (-(-counts.clamp(min=16) // step) * step).clamp(max=most)
