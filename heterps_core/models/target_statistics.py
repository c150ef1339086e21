"""Ordered target statistics: how often earlier rows with the same values were clicked, as input beside vectors.

As in CatBoost (Prokhorenkova et al. 2018, "CatBoost: unbiased boosting with categorical features"), a row sees the
labels of rows that were trained before it, and never its own. The sums are rows of a table as vectors are: replicas
share them, a checkpoint and an exported model hold them, and the next night goes on with them.

Shapes: B rows, S slots, L labels, K ids, W width of the incoming activation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import SUM, FeatureSpec
from heterps_core.embeddings.bags import Bags
from heterps_core.embeddings.row_optimizers import RowSums
from heterps_core.models.slot_embedding import SlotEmbedding

PRIOR_ROWS = 20.0
"""Rows with the click rate of all rows that each value begins with."""

_SCALE = 10.0
"""Of log odds: numbers below 1, as most are, learn little in one epoch (docs/QUALITY.md)."""


class TargetStatistics(SlotEmbedding):
    """Adds to an activation ten times the log odds of each slot's value less those of all rows: [B, W + S L].

    With v and c the weights of earlier rows with the value, of all and of those clicked, and r the click rate of all
    earlier rows, the odds are (c + p r) / (v - c + p (1 - r)), where p is `PRIOR_ROWS`. v and c of a list are summed
    over its values. Only the first epoch counts rows; a later one leaves out the row's own label, which was counted.
    """

    own_optimizer = RowSums

    def __init__(self, features: FeatureSpec, *, input_width: int = 0) -> None:
        # Columns that share vectors do not share clicks: a value in a history was not shown in this row.
        super().__init__(
            replace(features, slot_tables=()),
            dimension=1 + features.num_labels,
            include_dense=False,
            input_width=input_width,
            initial_standard_deviation=0.0,
        )
        lengths = (*features.slot_lengths, 1)
        # The last row of the table is for all rows.
        self.num_rows += 1
        self.bags = None if self.bags is None else Bags(lengths, (SUM,) * len(lengths))
        self.output_width = input_width + features.num_slots * features.num_labels

    def row_numbers(self, batch: ClickBatch) -> Tensor:
        """Return the rows of the table [B, K + 1] that a batch looks up."""
        return F.pad(super().row_numbers(batch), (0, 1), value=self.num_rows - 1)

    def forward(
        self, batch: ClickBatch, activation_BW: Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return [B, output_width] of type `dtype`; in the first epoch the backward pass counts the rows."""
        assert self.table is not None
        sums_BX = self.table.lookup(None if self.table.is_announced else self.row_numbers(batch))
        sums_BSD = sums_BX.view(-1, len(self.slots) + 1, self.dimension)
        if not self.training or batch.is_repeated:
            sums_BSD = sums_BSD.detach()
        if self.training:
            labels_BL = batch.labels.view(-1, self.dimension - 1)
            counts_BD = F.pad(labels_BL, (1, 0), value=1.0)
            if batch.weights is not None:
                counts_BD = counts_BD * batch.weights.unsqueeze(1)
            counts_BSD = counts_BD.unsqueeze(1).expand_as(sums_BSD)
            sums_BSD = (
                self._without(batch, sums_BSD, counts_BSD)
                if batch.is_repeated
                else _Counted.apply(sums_BSD, counts_BSD)  # type: ignore[no-untyped-call]
            )
        parts = [] if activation_BW is None else [activation_BW]
        parts.append(_SCALE * _log_odds(sums_BSD).flatten(1))
        return torch.cat([part.to(dtype) for part in parts], 1)

    def _without(self, batch: ClickBatch, sums_BSD: Tensor, counts_BSD: Tensor) -> Tensor:
        """Return the sums without a row's own label, which each of its values has counted."""
        if self.bags is not None:
            counts_BSD = counts_BSD * self.bags.counts(self.row_numbers(batch)).unsqueeze(2)
        return (sums_BSD - counts_BSD).clamp(min=0)


def _log_odds(sums_BSD: Tensor) -> Tensor:
    """Return the log odds of all slots but the last, which is of all rows, less those of the last."""
    seen_BS1, clicked_BSL = sums_BSD[:, :, :1], sums_BSD[:, :, 1:]
    prior_B1L = PRIOR_ROWS * (clicked_BSL[:, -1:] + 1) / (seen_BS1[:, -1:] + 2)
    clicked_BSL, seen_BS1 = clicked_BSL[:, :-1], seen_BS1[:, :-1]
    # Exactly 0 where the value is new.
    not_clicked_BSL = (seen_BS1 - clicked_BSL).clamp(min=0)
    return torch.log1p(clicked_BSL / prior_B1L) - torch.log1p(not_clicked_BSL / (PRIOR_ROWS - prior_B1L))


class _Counted(torch.autograd.Function):
    """Passes sums on, and adds a row to them when the backward pass comes, whatever its gradient."""

    @staticmethod
    def forward(ctx: Any, sums_BSD: Tensor, counts_BSD: Tensor) -> Tensor:
        ctx.save_for_backward(counts_BSD)
        return sums_BSD.view_as(sums_BSD)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        (counts_BSD,) = ctx.saved_tensors
        return counts_BSD, None
