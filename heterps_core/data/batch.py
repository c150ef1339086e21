"""A batch of clicks as torch tensors: B rows, D dense columns, S categorical slots.

The only file of this folder that loads torch, so that data can be prepared without it.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """[B, S] int64, row inside the table of its slot; row 0 of each slot stands for a missing value."""

    labels: torch.Tensor
    """[B] float32, 1 for a click and 0 for none."""

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return self.labels.shape[0]

    def to(self, device: torch.device) -> ClickBatch:
        """Return the batch on a device; the same one where it lies there already."""
        if self.labels.device == device:
            return self
        return ClickBatch(
            dense=to_device(self.dense, device),
            ids=to_device(self.ids, device),
            labels=to_device(self.labels, device),
        )

    @classmethod
    def from_numpy(
        cls,
        dense: npt.NDArray[np.float32],
        ids: npt.NDArray[np.int32] | npt.NDArray[np.int64],
        labels: npt.NDArray[np.uint8] | npt.NDArray[np.float32],
    ) -> ClickBatch:
        """Make a batch of dense [B, D], ids [B, S] and labels [B].

        Arrays that have the right type already are shared with the tensors, not copied.
        """
        return cls(
            dense=torch.from_numpy(dense.astype(np.float32, copy=False)),
            ids=torch.from_numpy(ids.astype(np.int64, copy=False)),
            labels=torch.from_numpy(labels.astype(np.float32, copy=False)),
        )
