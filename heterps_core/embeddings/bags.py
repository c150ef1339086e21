"""Bags: groups of the rows that a sample looks up, each summed into one vector.

Shapes: B samples, K rows that each looks up, `NO_ID` where a bag has fewer than it may have, G bags, D width of a
row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from heterps_core.compute_device import CPU
from heterps_core.data.features import NO_ID, SUM


class Bags:
    """Bags of neighbouring columns, in which a sample's rows stand first. Without any a sum is 0; a mean needs one.

    Columns after the last bag are values of sequences, which are not pooled.

    Args:
        lengths: Columns of each bag, at least 1.
        poolings: Of each bag `SUM`, or anything else for the mean.
    """

    def __init__(self, lengths: Sequence[int], poolings: Sequence[str]) -> None:
        lengths_G = torch.tensor(lengths, dtype=torch.int64, device=CPU)
        self.num_bags, self.num_columns = len(lengths), sum(lengths)
        self.starts = torch.cat([torch.zeros(1, dtype=torch.int64, device=CPU), lengths_G.cumsum(0)])
        """First column of each bag, then the number of columns, [G + 1]."""

        self._bag_of_K = torch.repeat_interleave(torch.arange(self.num_bags, device=CPU), lengths_G)
        is_mean = [pooling != SUM and length > 1 for pooling, length in zip(poolings, lengths, strict=True)]
        self._is_mean_G = torch.tensor(is_mean, device=CPU) if any(is_mean) else None

    def of(self, rows_BK: Tensor) -> Bags | None:
        """Return these bags for rows of their columns, and none for single rows [N, 1] of sequences."""
        return self if rows_BK.shape[1] == self.num_columns else None

    def counts(self, rows_BK: Tensor) -> Tensor:
        """Return how many rows are in each bag [B, G]."""
        ends_BK = (rows_BK != NO_ID).cumsum(1)
        return F.pad(ends_BK, (1, 0))[:, self.starts.to(rows_BK.device)].diff(dim=1)

    def divisors(self, rows_BK: Tensor) -> Tensor | None:
        """Return by what the sum of each bag is divided [B, G, 1]; None where all are sums."""
        if self._is_mean_G is None:
            return None
        return self.counts(rows_BK).where(self._is_mean_G.to(rows_BK.device), 1).unsqueeze(2)

    def pool(self, weight_RD: Tensor, rows_BK: Tensor) -> Tensor:
        """Return the sum of each bag's rows of a table [B, G, D]."""
        counts_N = self.counts(rows_BK).flatten()
        pooled = F.embedding_bag(
            rows_BK[rows_BK != NO_ID], weight_RD, counts_N.cumsum(0) - counts_N, mode="sum"
        )
        return pooled.view(len(rows_BK), self.num_bags, weight_RD.shape[1])

    def pool_in_place(self, vectors_BKD: Tensor, rows_BK: Tensor) -> Tensor:
        """Return the pooled vectors [B, G, D]; no size depends on a value, as torch.export wants it."""
        present_BKD = vectors_BKD * (rows_BK != NO_ID).unsqueeze(2)
        pooled_BGD = present_BKD.new_zeros(rows_BK.shape[0], self.num_bags, vectors_BKD.shape[2])
        pooled_BGD = pooled_BGD.index_add(1, self._bag_of_K, present_BKD)
        divisors_BG1 = self.divisors(rows_BK)
        return pooled_BGD if divisors_BG1 is None else pooled_BGD / divisors_BG1

    def spread(self, rows_BK: Tensor, gradients_BX: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows [N, 1] with the gradient [N, D] of the bag that each is in."""
        sample_N, column_N = (rows_BK != NO_ID).nonzero(as_tuple=True)
        gradients_BGD = gradients_BX.reshape(
            len(rows_BK), self.num_bags, gradients_BX.shape[1] // self.num_bags
        )
        bag_N = self._bag_of_K.to(rows_BK.device)[column_N]
        return rows_BK[sample_N, column_N].unsqueeze(1), gradients_BGD[sample_N, bag_N]
