"""A batch of clicks as torch tensors: B rows, D dense columns, K ids, those of the slots side by side.

The only file of this folder that loads torch, so that data can be prepared without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from heterps_core.compute_device import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class ClickBatch:
    """Features and labels of B impressions."""

    dense: torch.Tensor
    """[B, D] float32, standardised; 0 where the value is missing."""

    ids: torch.Tensor
    """[B, K] int64, row inside the table of its slot, where row 0 stands for a missing value, or with dynamic ids its
    key; `NO_ID` fills the places after the end of a list."""

    labels: torch.Tensor
    """[B] float32, 1 for a click and 0 for none; [B, labels] where there are several."""

    weights: torch.Tensor | None = None
    """[B] float32, what each row counts for; None where all count alike."""

    is_repeated: bool = False
    """An earlier epoch trained these rows."""

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return self.labels.shape[0]

    def to(self, device: torch.device) -> ClickBatch:
        """Return the batch on a device; the same one where it lies there already."""
        if self.labels.device == device:
            return self
        return self._each(lambda tensor: to_device(tensor, device))

    def rows(self, first: int, stop: int) -> ClickBatch:
        """Return rows first..stop - 1; this batch itself for all."""
        if (first, stop) == (0, self.num_rows):
            return self
        return self._each(lambda tensor: tensor[first:stop])

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ClickBatch:
        return replace(
            self,
            dense=change(self.dense),
            ids=change(self.ids),
            labels=change(self.labels),
            weights=None if self.weights is None else change(self.weights),
        )

    @classmethod
    def from_numpy(
        cls,
        dense: npt.NDArray[np.float32],
        ids: npt.NDArray[np.int32] | npt.NDArray[np.int64],
        labels: npt.NDArray[np.uint8] | npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None = None,
    ) -> ClickBatch:
        """Make a batch of dense [B, D], ids [B, K], labels [B] and weights [B].

        Arrays that have the right type already are shared with the tensors, not copied.
        """
        return cls(
            dense=torch.from_numpy(dense.astype(np.float32, copy=False)),
            ids=torch.from_numpy(ids.astype(np.int64, copy=False)),
            labels=torch.from_numpy(labels.astype(np.float32, copy=False)),
            weights=None if weights is None else torch.from_numpy(weights),
        )
