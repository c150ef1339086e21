"""Dropout whose masks follow from the seed, the epoch, the row and the layer, and from nothing else.

Torch draws masks one after the other, so they depend on how a batch is cut into micro-batches, stages and replicas.
Here a mask is a hash: a plan with another cut, and a run that is resumed under it, drop the same values.

Shapes: B rows of a micro-batch, X values of a row.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NUM_HASHES = 2**32
_FIRST_FACTOR, _SECOND_FACTOR = 0x7FEB352D, 0x846CA68B - _NUM_HASHES
"""Odd and of 32 bits with a sign, as torch's integers have one. A product's upper bits depend on all lower ones."""


class RowDropout(nn.Module):
    """Sets each value of a row to 0 with probability `p` in training, and divides the others by 1 - p.

    Args:
        p: In [0, 1].
        number: Of the layer in its model; layers of one number drop alike.

    Attributes:
        row_keys: Of the rows that come next, int32 [B]; see `keys_of_rows`. None draws masks from torch's generator.
    """

    def __init__(self, p: float, *, number: int) -> None:
        super().__init__()
        self.p = p
        self.row_keys: Tensor | None = None
        self._number = number

    def forward(self, values_BX: Tensor) -> Tensor:
        """Return the values, in evaluation mode unchanged."""
        if not self.training or self.row_keys is None:
            return F.dropout(values_BX, self.p, self.training)
        generator = torch.Generator().manual_seed(self._number)
        width = values_BX[0].numel()
        keys_X = torch.randint(_NUM_HASHES, (width,), generator=generator).to(values_BX.device, torch.int32)
        hashes_BX = (self.row_keys[:, None] ^ keys_X).mul_(_FIRST_FACTOR)
        hashes_BX = (hashes_BX ^ (hashes_BX >> 15 & 0x1FFFF)).mul_(_SECOND_FACTOR)
        # Signed, so the smallest is -2^31.
        is_kept_BX = hashes_BX >= int(self.p * (_NUM_HASHES - 1)) - _NUM_HASHES // 2
        factors_BX = is_kept_BX.to(values_BX.dtype).mul_(0.0 if self.p == 1 else 1 / (1 - self.p))
        return values_BX * factors_BX.view_as(values_BX)


def keys_of_rows(rows_B: npt.NDArray[np.int64], *, seed: int, epoch: int) -> Tensor:
    """Return what masks of rows follow from, int32 [B].

    Args:
        rows_B: Their indices in the data set.
        seed: Of the training, at least 0.
        epoch: From 0.
    """
    key = _epoch_key(seed, epoch)
    # The finalizer of SplitMix64: Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators".
    mixed_B = rows_B.astype(np.uint64) + key
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed_B = (mixed_B ^ (mixed_B >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy((mixed_B >> np.uint64(32)).astype(np.uint32).view(np.int32))


@functools.cache
def _epoch_key(seed: int, epoch: int) -> np.uint64:
    return np.uint64(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0])


def with_row_dropout(module: nn.Module) -> nn.Module:
    """Put a `RowDropout` in the place of each `nn.Dropout` of a module, in place; subclasses stay."""
    named = [
        (path, part)
        for path, part in module.named_modules(remove_duplicate=False)
        if path and type(part) is nn.Dropout
    ]
    made: dict[nn.Module, RowDropout] = {}
    for path, part in named:
        made.setdefault(part, RowDropout(part.p, number=len(made)))
        module.set_submodule(path, made[part])
    return module
